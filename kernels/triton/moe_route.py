"""Which experts a token goes to: ``reference.route`` in one pass over the logits, without sorting them.

    logits [T,E] 16 or 32-bit float   bias float32 [E]   weights float32 [T,k], ids int32 [T,k]

Cost: reads the logits once, writes 8 bytes per choice; about 4 E operations a token and 3 E in each of k rounds of a
maximum. Each group of experts is padded to a power of two by itself, so that lanes fold into groups.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

MIN_LANES = 256


@triton.jit
def within_best_groups(
    choice: tl.tensor,
    TOP_GROUPS: tl.constexpr,
    TOP2: tl.constexpr,
    BLOCK_T: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    SIZE_PAD: tl.constexpr,
) -> tl.tensor:
    """choice [BLOCK_T, lanes], minus infinity outside the best groups of each token."""
    grouped = tl.reshape(choice, [BLOCK_T, GROUP_PAD, SIZE_PAD])
    if TOP2:
        worth, best = tl.max(grouped, 2, return_indices=True)
        rest = tl.where(tl.arange(0, SIZE_PAD)[None, None, :] == best[:, :, None], float("-inf"), grouped)
        worth += tl.max(rest, 2)
    else:
        worth = tl.max(grouped, 2)
    eligible = tl.zeros([BLOCK_T, GROUP_PAD], dtype=tl.int32)
    for _ in range(TOP_GROUPS):
        _, at = tl.max(worth, 1, return_indices=True)
        hit = tl.arange(0, GROUP_PAD)[None, :] == at[:, None]
        eligible = tl.where(hit, 1, eligible)
        worth = tl.where(hit, float("-inf"), worth)
    spread = tl.broadcast_to(eligible[:, :, None], [BLOCK_T, GROUP_PAD, SIZE_PAD])
    return tl.where(tl.reshape(spread, [BLOCK_T, GROUP_PAD * SIZE_PAD]) > 0, choice, float("-inf"))


# A batch of any size runs the same machine code.
@triton.jit(do_not_specialize=["num_tokens"])
def moe_route_kernel(
    logits_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    num_tokens: tl.tensor,
    logits_row_stride: tl.tensor,
    scaling: tl.tensor,
    TOP_K: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    TOP2: tl.constexpr,
    BLOCK_T: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    SIZE_PAD: tl.constexpr,
    K_PAD: tl.constexpr,
) -> None:
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    token_mask = tokens < num_tokens
    lane = tl.arange(0, GROUP_PAD * SIZE_PAD)
    group, place = lane // SIZE_PAD, lane % SIZE_PAD
    expert = group * GROUP_SIZE + place
    valid = (group < NUM_GROUPS) & (place < GROUP_SIZE)
    rows = logits_ptr + tokens.to(tl.int64)[:, None] * logits_row_stride
    logits = tl.load(rows + expert[None, :], mask=token_mask[:, None] & valid[None, :], other=0.0).to(tl.float32)
    logits = tl.where(valid[None, :], logits, float("-inf"))
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    else:
        scores = tl.exp(logits - tl.max(logits, 1)[:, None])
        scores = scores / tl.sum(scores, 1)[:, None]
    choice = scores
    if HAS_BIAS:
        choice += tl.load(bias_ptr + expert, mask=valid, other=0.0)[None, :]
    # A score that is no number must not win, nor leave the choice to the padding.
    choice = tl.where(choice == choice, choice, -3.0e38)
    choice = tl.where(valid[None, :], choice, float("-inf"))
    if NUM_GROUPS > 1:
        choice = within_best_groups(choice, TOP_GROUPS, TOP2, BLOCK_T, GROUP_PAD, SIZE_PAD)
    column = tl.arange(0, K_PAD)[None, :]
    weights = tl.zeros([BLOCK_T, K_PAD], dtype=tl.float32)
    ids = tl.zeros([BLOCK_T, K_PAD], dtype=tl.int32)
    for index in range(TOP_K):
        _, best = tl.max(choice, 1, return_indices=True)
        hit = lane[None, :] == best[:, None]
        score = tl.sum(tl.where(hit, scores, 0.0), 1)
        weights = tl.where(column == index, score[:, None], weights)
        ids = tl.where(column == index, (best // SIZE_PAD * GROUP_SIZE + best % SIZE_PAD)[:, None], ids)
        choice = tl.where(hit, float("-inf"), choice)
    if RENORMALIZE:
        weights = weights / (tl.sum(weights, 1) + 1e-20)[:, None]
    out = tokens.to(tl.int64)[:, None] * TOP_K + column
    mask = token_mask[:, None] & (column < TOP_K)
    tl.store(weights_ptr + out, weights * scaling, mask=mask)
    tl.store(ids_ptr + out, ids, mask=mask)


def constants(num_experts: int, top_k: int, num_groups: int = 1, top_groups: int = 1) -> dict[str, Any]:
    """The compile-time sizes. How many tokens a program takes follows from E alone: no result depends on the batch."""
    size = num_experts // num_groups
    group_pad, size_pad = triton.next_power_of_2(num_groups), triton.next_power_of_2(size)
    return {
        "TOP_K": top_k,
        "NUM_GROUPS": num_groups,
        "GROUP_SIZE": size,
        "TOP_GROUPS": top_groups,
        "BLOCK_T": max(1, MIN_LANES // (group_pad * size_pad)),
        "GROUP_PAD": group_pad,
        "SIZE_PAD": size_pad,
        "K_PAD": triton.next_power_of_2(top_k),
    }


def route(
    logits: Tensor,
    top_k: int,
    *,
    scoring: str = "softmax",
    renormalize: bool = True,
    num_groups: int = 1,
    top_groups: int = 1,
    bias: Tensor | None = None,
    scaling: float = 1.0,
    group_score: str = "max",
) -> tuple[Tensor, Tensor]:
    """``reference.route``: logits [T,E] -> (weights float32 [T,k], expert ids int32 [T,k])."""
    tokens, experts = logits.shape
    assert experts % num_groups == 0, f"{experts} experts do not fall into {num_groups} groups"
    assert top_k <= experts // num_groups * top_groups, f"{top_k} experts out of {top_groups} of {num_groups} groups"
    weights = torch.empty((tokens, top_k), dtype=torch.float32, device=logits.device)
    ids = torch.empty((tokens, top_k), dtype=torch.int32, device=logits.device)
    if tokens == 0:
        return weights, ids
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    values = constants(experts, top_k, num_groups, top_groups)
    moe_route_kernel[(triton.cdiv(tokens, values["BLOCK_T"]),)](
        logits,
        weights if bias is None else bias.float(),
        weights,
        ids,
        tokens,
        logits.stride(0),
        float(scaling),
        SIGMOID=scoring == "sigmoid",
        RENORMALIZE=renormalize,
        HAS_BIAS=bias is not None,
        TOP2=group_score == "top2_sum" and values["GROUP_SIZE"] > 1,
        **values,
        num_warps=1,
    )
    return weights, ids
