"""Attention over the paged KV cache, one kernel for prefill, decode and any mixture of both.

A program owns ``block_m`` query rows: the GROUP = H/G query heads of one KV head for ``block_m // GROUP`` neighbouring
tokens of one request, so that every cached key and value is read once for all the heads that share it. It walks the
request's tokens in tiles through the block table with an online softmax (arXiv:1805.02867) in float32.

Few requests with long contexts leave a GPU idle, so their contexts are split: each split writes its unnormalized sum
with the maximum and the denominator, and ``reduce_splits_kernel`` combines them.

Cost per request and KV head: reads 2 L D cached elements (L tokens seen) once per ``block_m // GROUP`` query tokens,
reads and writes GROUP D elements per query token; 4 L D operations per query row. Splits add 4 (D + 2) bytes written
and read per (query row, split).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..attention_batch import AttentionBatch
from ..kv_layout import KVCache
from .launch_table import AttentionLaunch, attention_launch
from .runtime import device_arch, num_cores

LOG2_E = 1.4426950408889634
MAX_SPLITS = 64
MIN_SPLIT_TOKENS = 256
REDUCE_DIMS = 64


@triton.jit
def paged_attention_kernel(
    q_ptr: tl.tensor,
    key_ptr: tl.tensor,
    value_ptr: tl.tensor,
    out_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    stats_ptr: tl.tensor,
    block_table_ptr: tl.tensor,
    query_start_loc_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    scale: tl.tensor,
    soft_cap: tl.tensor,
    window: tl.tensor,
    num_requests: tl.tensor,
    num_heads: tl.tensor,
    q_token_stride: tl.tensor,
    q_head_stride: tl.tensor,
    k_block_stride: tl.tensor,
    k_slot_stride: tl.tensor,
    k_head_stride: tl.tensor,
    k_dim_stride: tl.tensor,
    v_block_stride: tl.tensor,
    v_slot_stride: tl.tensor,
    v_head_stride: tl.tensor,
    v_dim_stride: tl.tensor,
    table_stride: tl.tensor,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    ONE_TOKEN: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    SPLIT: tl.constexpr,
) -> None:
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    kv_head = tl.program_id(1)
    request, first_query = _locate(query_start_loc_ptr, num_requests, BLOCK_Q, ONE_TOKEN)
    query_start = tl.load(query_start_loc_ptr + request)
    query_len = tl.load(query_start_loc_ptr + request + 1) - query_start
    if first_query >= query_len:
        return
    seq_len = tl.load(seq_lens_ptr + request)
    context_len = seq_len - query_len

    rows = tl.arange(0, BLOCK_M)
    queries = first_query + rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    row_mask = (rows < BLOCK_Q * GROUP) & (queries < query_len)
    tokens = (query_start + queries).to(tl.int64)
    dims = tl.arange(0, HEAD_PAD)
    mask = row_mask[:, None] & (dims < HEAD_SIZE)[None, :]
    q_offsets = (tokens * q_token_stride + heads * q_head_stride)[:, None] + dims[None, :]
    q = tl.load(q_ptr + q_offsets, mask=mask, other=0.0)

    positions = context_len + queries
    end = tl.minimum(context_len + first_query + BLOCK_Q, seq_len)
    first_tile = 0
    if HAS_WINDOW:
        first_tile = tl.maximum(context_len + first_query - window + 1, 0) // TILE
    last_tile = tl.cdiv(end, TILE)
    if SPLIT:
        tiles_per_split = tl.cdiv(last_tile - first_tile, tl.num_programs(2))
        first_tile += tl.program_id(2) * tiles_per_split
        last_tile = tl.minimum(first_tile + tiles_per_split, last_tile)

    acc, maximum, denominator = _attend(
        q, key_ptr + kv_head * k_head_stride, value_ptr + kv_head * v_head_stride,
        block_table_ptr + request.to(tl.int64) * table_stride, positions, row_mask, first_tile, last_tile, end,
        scale, soft_cap, window, k_block_stride, k_slot_stride, k_dim_stride, v_block_stride, v_slot_stride,
        v_dim_stride, HEAD_SIZE, BLOCK_SIZE, TILE, HAS_WINDOW, HAS_SOFT_CAP,
    )  # fmt: skip
    out_rows = tokens * num_heads + heads
    if SPLIT:
        split_rows = out_rows * tl.num_programs(2) + tl.program_id(2)
        tl.store(partial_ptr + split_rows[:, None] * HEAD_SIZE + dims[None, :], acc, mask=mask)
        tl.store(stats_ptr + split_rows * 2, maximum, mask=row_mask)
        tl.store(stats_ptr + split_rows * 2 + 1, denominator, mask=row_mask)
    else:
        out = acc / denominator[:, None]
        tl.store(out_ptr + out_rows[:, None] * HEAD_SIZE + dims[None, :], out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _locate(
    query_start_loc_ptr: tl.tensor, num_requests: tl.tensor, BLOCK_Q: tl.constexpr, ONE_TOKEN: tl.constexpr
) -> Any:
    """(request, first query row) of this program.

    Request r owns the programs from ``query_start_loc[r] // BLOCK_Q + r`` on: at least as many as it needs, whatever
    the lengths, so that the grid follows from T and B alone and the lengths stay on the device.
    """
    program = tl.program_id(0)
    request = program
    first_query = program * 0
    if not ONE_TOKEN:
        low = program * 0
        high = low + num_requests
        while low < high:
            middle = (low + high) // 2
            if tl.load(query_start_loc_ptr + middle) // BLOCK_Q + middle <= program:
                low = middle + 1
            else:
                high = middle
        request = low - 1
        first_program = tl.load(query_start_loc_ptr + request) // BLOCK_Q + request
        first_query = (program - first_program) * BLOCK_Q
    return request, first_query


@triton.jit
def _attend(
    q: tl.tensor,
    key_ptr: tl.tensor,
    value_ptr: tl.tensor,
    table_ptr: tl.tensor,
    positions: tl.tensor,
    row_mask: tl.tensor,
    first_tile: tl.tensor,
    last_tile: tl.tensor,
    end: tl.tensor,
    scale: tl.tensor,
    soft_cap: tl.tensor,
    window: tl.tensor,
    k_block_stride: tl.tensor,
    k_slot_stride: tl.tensor,
    k_dim_stride: tl.tensor,
    v_block_stride: tl.tensor,
    v_slot_stride: tl.tensor,
    v_dim_stride: tl.tensor,
    HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
) -> Any:
    """Online softmax of the rows ``q`` over tiles of one request's tokens: (unnormalized sum, maximum, denominator)."""
    dims = tl.arange(0, q.shape[1])
    dim_mask = dims < HEAD_SIZE
    maximum = tl.full([q.shape[0]], float("-inf"), dtype=tl.float32)
    denominator = tl.zeros([q.shape[0]], dtype=tl.float32)
    acc = tl.zeros(q.shape, dtype=tl.float32)
    for tile in range(first_tile, last_tile):
        columns = tile * TILE + tl.arange(0, TILE)
        column_mask = columns < end
        blocks = tl.load(table_ptr + columns // BLOCK_SIZE, mask=column_mask, other=0).to(tl.int64)
        slots = columns % BLOCK_SIZE
        k_offsets = (blocks * k_block_stride + slots * k_slot_stride)[None, :] + (dims * k_dim_stride)[:, None]
        k = tl.load(key_ptr + k_offsets, mask=column_mask[None, :] & dim_mask[:, None], other=0.0)
        scores = tl.dot(q, k.to(q.dtype), input_precision="ieee") * scale
        scores = _mask_scores(scores, columns, positions, row_mask, soft_cap, window, HAS_SOFT_CAP, HAS_WINDOW)
        new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
        # A row that has seen nothing yet has maximum -inf; 0 keeps the exponents from becoming nan.
        finite_maximum = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weights = tl.exp2(scores - finite_maximum[:, None])
        correction = tl.exp2(maximum - finite_maximum)
        denominator = denominator * correction + tl.sum(weights, axis=1)
        v_offsets = (blocks * v_block_stride + slots * v_slot_stride)[:, None] + (dims * v_dim_stride)[None, :]
        v = tl.load(value_ptr + v_offsets, mask=column_mask[:, None] & dim_mask[None, :], other=0.0)
        acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc * correction[:, None], input_precision="ieee")
        maximum = new_maximum
    return acc, maximum, denominator


@triton.jit
def _mask_scores(
    scores: tl.tensor,
    columns: tl.tensor,
    positions: tl.tensor,
    row_mask: tl.tensor,
    soft_cap: tl.tensor,
    window: tl.tensor,
    HAS_SOFT_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
) -> tl.tensor:
    """Scores in base 2, -inf where a row may not look."""
    if HAS_SOFT_CAP:
        # cap * tanh(s / cap) -> Any: ``scores`` is 2 s / cap and ``soft_cap`` the cap, both times log2(e)
        scores = soft_cap * (1.0 - 2.0 / (tl.exp2(scores) + 1.0))
    visible = row_mask[:, None] & (columns[None, :] <= positions[:, None])
    if HAS_WINDOW:
        visible = visible & (columns[None, :] > positions[:, None] - window)
    return tl.where(visible, scores, float("-inf"))


@triton.jit
def reduce_splits_kernel(
    partial_ptr: tl.tensor,
    stats_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_splits: tl.tensor,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLITS_PAD: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    splits = tl.arange(0, SPLITS_PAD)
    dims = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    split_rows = row * num_splits + splits
    maxima = tl.load(stats_ptr + split_rows * 2, mask=splits < num_splits, other=float("-inf"))
    denominators = tl.load(stats_ptr + split_rows * 2 + 1, mask=splits < num_splits, other=0.0)
    # Every row sees at least its own token, so one maximum is finite.
    factors = tl.exp2(maxima - tl.max(maxima, axis=0))
    mask = (factors > 0.0)[:, None] & (dims < HEAD_SIZE)[None, :]
    parts = tl.load(partial_ptr + split_rows[:, None] * HEAD_SIZE + dims[None, :], mask=mask, other=0.0)
    out = tl.sum(parts * factors[:, None], axis=0) / tl.sum(denominators * factors, axis=0)
    tl.store(out_ptr + row * HEAD_SIZE + dims, out.to(out_ptr.dtype.element_ty), mask=dims < HEAD_SIZE)


def constants(launch: AttentionLaunch, group: int, head_size: int, block_size: int) -> dict[str, Any]:
    """The compile-time arguments that follow from the model and the launch row."""
    return {
        "GROUP": group,
        "HEAD_SIZE": head_size,
        "HEAD_PAD": triton.next_power_of_2(head_size),
        "BLOCK_SIZE": block_size,
        "BLOCK_M": max(launch.block_m, triton.next_power_of_2(group)),
        "TILE": launch.tile,
    }


def paged_attention(
    query: Tensor,
    cache: KVCache,
    batch: AttentionBatch,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float = 0.0,
) -> Tensor:
    """``reference.paged_attention``: query [T,H,D] over a cache of any strides -> [T,H,D], contiguous."""
    rows = batch.max_query_len * (query.shape[1] // cache.key.shape[2])
    launch = attention_launch(
        device_arch(query.device), "decode" if rows <= 16 else "prefill", query.shape[2], query.element_size()
    )
    one_block = rows <= launch.block_m
    splits = num_splits(batch, cache.key.shape[2], sliding_window, num_cores(query.device)) if one_block else 1
    return launch_attention(query, cache, batch, scale, sliding_window, soft_cap, launch, splits)


def num_splits(batch: AttentionBatch, num_kv_heads: int, sliding_window: int | None, cores: int) -> int:
    """Parts to cut each context into: enough to fill the cores twice, none below ``MIN_SPLIT_TOKENS`` tokens."""
    programs = batch.num_requests * num_kv_heads
    if programs == 0 or programs >= cores:
        return 1
    seen = batch.max_seq_len if sliding_window is None else min(batch.max_seq_len, sliding_window)
    return max(1, min(triton.cdiv(2 * cores, programs), seen // MIN_SPLIT_TOKENS, MAX_SPLITS))


def launch_attention(
    query: Tensor,
    cache: KVCache,
    batch: AttentionBatch,
    scale: float,
    sliding_window: int | None,
    soft_cap: float,
    launch: AttentionLaunch,
    splits: int,
) -> Tensor:
    """``paged_attention`` with the launch row and the number of splits given."""
    if query.stride(-1) != 1:
        query = query.contiguous()
    num_tokens, num_heads, head_size = query.shape
    num_kv_heads = cache.key.shape[2]
    group = num_heads // num_kv_heads
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if num_tokens == 0:
        return out
    values = constants(launch, group, head_size, cache.block_size)
    one_token = batch.max_query_len == 1
    programs = batch.num_requests if one_token else num_tokens // (values["BLOCK_M"] // group) + batch.num_requests
    partial, stats = _split_buffers(out, splits)
    score_scale = scale * (2.0 / soft_cap if soft_cap else 1.0) * LOG2_E
    paged_attention_kernel[(programs, num_kv_heads, splits)](
        query,
        cache.key,
        cache.value,
        out,
        partial,
        stats,
        batch.block_table,
        batch.query_start_loc,
        batch.seq_lens,
        score_scale,
        soft_cap * LOG2_E,
        sliding_window or 0,
        batch.num_requests,
        num_heads,
        query.stride(0),
        query.stride(1),
        *cache.key.stride(),
        *cache.value.stride(),
        batch.block_table.stride(0),
        **values,
        ONE_TOKEN=one_token,
        HAS_WINDOW=sliding_window is not None,
        HAS_SOFT_CAP=soft_cap != 0.0,
        SPLIT=splits > 1,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        **launch.options,
    )
    if splits > 1:
        _reduce(partial, stats, out, splits)
    return out


def _split_buffers(out: Tensor, splits: int) -> tuple[Tensor, Tensor]:
    """float32 sums [T,H,splits,D] and (maximum, denominator) [T,H,splits,2]; unused (and so ``out``) without splits."""
    if splits == 1:
        return out, out
    num_tokens, num_heads, head_size = out.shape
    shape = (num_tokens, num_heads, splits)
    partial = torch.empty((*shape, head_size), dtype=torch.float32, device=out.device)
    return partial, torch.empty((*shape, 2), dtype=torch.float32, device=out.device)


def reduce_constants(head_size: int, splits: int) -> dict[str, Any]:
    """The compile-time arguments of the reduction over splits."""
    return {"HEAD_SIZE": head_size, "BLOCK_D": REDUCE_DIMS, "SPLITS_PAD": triton.next_power_of_2(splits)}


def _reduce(partial: Tensor, stats: Tensor, out: Tensor, splits: int) -> None:
    num_tokens, num_heads, head_size = out.shape
    grid = (num_tokens * num_heads, triton.cdiv(head_size, REDUCE_DIMS))
    reduce_splits_kernel[grid](partial, stats, out, splits, **reduce_constants(head_size, splits), num_warps=4)
