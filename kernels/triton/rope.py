"""Rotary position embedding of query and key in one launch, in place.

Pairs (a, b) become (a cos - b sin, b cos + a sin) in float32. Pairs are (i, i + R/2), or (2i, 2i + 1) when
interleaved; elements from R on stay as they are. Cost per token: reads and writes (H + G) R elements, reads R float32
of the table; 6 operations a pair.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from .launch_table import row_launch
from .runtime import device_arch


@triton.jit
def rope_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    cos_sin_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    num_heads: tl.tensor,
    num_kv_heads: tl.tensor,
    q_token_stride: tl.tensor,
    q_head_stride: tl.tensor,
    k_token_stride: tl.tensor,
    k_head_stride: tl.tensor,
    cos_sin_stride: tl.tensor,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
) -> None:
    # Program axis 1 walks the blocks of query heads, then those of key heads.
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    num_q_blocks = tl.cdiv(num_heads, BLOCK_HEADS)
    is_key = block >= num_q_blocks
    heads = tl.where(is_key, block - num_q_blocks, block) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    position = tl.load(positions_ptr + token)
    pairs = tl.arange(0, HALF_PAD)
    table = cos_sin_ptr + position * cos_sin_stride + pairs
    cos = tl.load(table, mask=pairs < HALF, other=0.0)[None, :]
    sin = tl.load(table + HALF, mask=pairs < HALF, other=0.0)[None, :]
    if is_key:
        mask = (heads < num_kv_heads)[:, None] & (pairs < HALF)[None, :]
        rows = k_ptr + token * k_token_stride + heads[:, None] * k_head_stride
        _rotate(rows, pairs[None, :], mask, cos, sin, HALF, INTERLEAVED)
    else:
        mask = (heads < num_heads)[:, None] & (pairs < HALF)[None, :]
        rows = q_ptr + token * q_token_stride + heads[:, None] * q_head_stride
        _rotate(rows, pairs[None, :], mask, cos, sin, HALF, INTERLEAVED)


@triton.jit
def _rotate(
    rows: tl.tensor,
    pairs: tl.tensor,
    mask: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
) -> None:
    if INTERLEAVED:
        first = rows + 2 * pairs
        second = first + 1
    else:
        first = rows + pairs
        second = first + HALF
    a = tl.load(first, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(second, mask=mask, other=0.0).to(tl.float32)
    tl.store(first, (a * cos - b * sin).to(rows.dtype.element_ty), mask=mask)
    tl.store(second, (b * cos + a * sin).to(rows.dtype.element_ty), mask=mask)


def constants(rotary_size: int, interleaved: bool) -> dict[str, Any]:
    """The compile-time arguments for ``rotary_size`` rotated elements per head."""
    half = rotary_size // 2
    half_pad = triton.next_power_of_2(half)
    return {"HALF": half, "HALF_PAD": half_pad, "BLOCK_HEADS": max(1, 512 // half_pad), "INTERLEAVED": interleaved}


def rope(q: Tensor, k: Tensor, cos_sin: Tensor, positions: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Rotate q [T,H,D] and k [T,G,D] in place (a tensor whose last dimension is strided is copied first).

    ``cos_sin`` float32 [P,R]: R/2 cosines, then R/2 sines per position; ``positions`` int64 [T].
    """
    q, k = (part if part.stride(-1) == 1 else part.contiguous() for part in (q, k))
    num_tokens, num_heads, _ = q.shape
    if num_tokens == 0:
        return q, k
    values = constants(cos_sin.shape[-1], interleaved)
    num_blocks = sum(triton.cdiv(part.shape[1], values["BLOCK_HEADS"]) for part in (q, k))
    rope_kernel[(num_tokens, num_blocks)](
        q,
        k,
        cos_sin,
        positions,
        num_heads,
        k.shape[1],
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        cos_sin.stride(0),
        **values,
        num_warps=row_launch(device_arch(q.device), 1).num_warps,
    )
    return q, k
