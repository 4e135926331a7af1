"""Attention over the paged KV cache, one kernel for prefill, decode and any mixture of both.

A program owns ``block_m`` query rows: HEADS of the GROUP = H/G query heads of one KV head, for ``block_m // HEADS``
neighbouring tokens of one request, so that every cached key and value is read once for all of them. HEADS is GROUP
where that fits the rows, else an even part of it. The program walks the request's tokens in tiles through the block
table with an online softmax (arXiv:1805.02867) in float32. Attention sinks are where that softmax starts.

The cache may be float32, 16-bit, or int8 or fp8 with a scale per token and head (``attention_tiles.py`` says in which
types the products are). Values may have another size than keys; where they are the first features of the keys
(DeepSeek's multi-head latent attention, 576 and 512), a tile of keys is read once and serves as both.

Few requests with long contexts leave a GPU idle, so their contexts are split: each split writes its unnormalized sum
with the maximum and the denominator, and ``reduce_splits_kernel`` combines them.

Cost per request and KV head: reads L (D + Dv) cached elements (L tokens seen; L D where values are keys) and their
scales once per ``block_m`` query rows, reads GROUP D and writes GROUP Dv elements per query token; 2 L (D + Dv)
operations per query row. Splits add 4 (Dv + 2) bytes written and read per (query row, split).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..attention_batch import AttentionBatch
from ..kv_layout import KVCache
from .attention_splits import num_splits, reduce_splits, split_buffers
from .attention_tiles import attend, locate, start_rows, tile_range
from .launch_attention import attention_launch
from .launch_table import AttentionLaunch
from .runtime import device_arch, num_cores

LOG2_E = 1.4426950408889634


# fmt: off
@triton.jit
def paged_attention_kernel(
    q_ptr: tl.tensor, key_ptr: tl.tensor, value_ptr: tl.tensor, key_scale_ptr: tl.tensor, value_scale_ptr: tl.tensor,
    sinks_ptr: tl.tensor, slopes_ptr: tl.tensor, out_ptr: tl.tensor, partial_ptr: tl.tensor, stats_ptr: tl.tensor,
    block_table_ptr: tl.tensor, query_start_loc_ptr: tl.tensor, seq_lens_ptr: tl.tensor,
    scale: tl.tensor, soft_cap: tl.tensor, window: tl.tensor, num_requests: tl.tensor, num_heads: tl.tensor,
    q_token_stride: tl.tensor, q_head_stride: tl.tensor,
    k_block_stride: tl.tensor, k_slot_stride: tl.tensor, k_head_stride: tl.tensor, k_dim_stride: tl.tensor,
    v_block_stride: tl.tensor, v_slot_stride: tl.tensor, v_head_stride: tl.tensor, v_dim_stride: tl.tensor,
    ks_block_stride: tl.tensor, ks_slot_stride: tl.tensor, ks_head_stride: tl.tensor,
    vs_block_stride: tl.tensor, vs_slot_stride: tl.tensor, vs_head_stride: tl.tensor,
    table_stride: tl.tensor,
    GROUP: tl.constexpr, HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, HEAD_MAIN: tl.constexpr,
    HEAD_REST: tl.constexpr, VALUE_SIZE: tl.constexpr, VALUE_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, TILE: tl.constexpr, ONE_TOKEN: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_ALIBI: tl.constexpr, SCALED: tl.constexpr,
    VALUE_IS_KEY: tl.constexpr, SPLIT: tl.constexpr,
) -> None:
    # fmt: on
    BLOCK_Q: tl.constexpr = BLOCK_M // HEADS
    HEAD_TILES: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    kv_head = tl.program_id(1) // HEAD_TILES
    request, first_query = locate(query_start_loc_ptr, num_requests, BLOCK_Q, ONE_TOKEN)
    query_start = tl.load(query_start_loc_ptr + request)
    query_len = tl.load(query_start_loc_ptr + request + 1) - query_start
    if first_query >= query_len:
        return
    seq_len = tl.load(seq_lens_ptr + request)
    context_len = seq_len - query_len
    rows = tl.arange(0, BLOCK_M)
    queries = first_query + rows // HEADS
    in_group = tl.program_id(1) % HEAD_TILES * HEADS + rows % HEADS
    row_mask = (rows < BLOCK_Q * HEADS) & (queries < query_len) & (in_group < GROUP)
    tokens = (query_start + queries).to(tl.int64)
    heads = kv_head * GROUP + in_group
    q_rows = q_ptr + tokens * q_token_stride + heads * q_head_stride
    q = _load_features(q_rows, row_mask, 0, HEAD_MAIN, HEAD_SIZE)
    q_rest = q
    if HEAD_REST > 0:
        q_rest = _load_features(q_rows, row_mask, HEAD_MAIN, HEAD_REST, HEAD_SIZE)
    maximum, denominator = start_rows(sinks_ptr, heads, row_mask, HAS_SINKS)
    slopes = maximum
    if HAS_ALIBI:
        slopes = tl.load(slopes_ptr + heads, mask=row_mask, other=0.0).to(tl.float32) * 1.4426950408889634
    end = tl.minimum(context_len + first_query + BLOCK_Q, seq_len)
    first_tile, last_tile = tile_range(context_len + first_query, end, window, TILE, HAS_WINDOW, SPLIT)
    acc, maximum, denominator = attend(
        q, q_rest, maximum, denominator, slopes, key_ptr + kv_head * k_head_stride, value_ptr + kv_head * v_head_stride,
        key_scale_ptr + kv_head * ks_head_stride, value_scale_ptr + kv_head * vs_head_stride,
        block_table_ptr + request.to(tl.int64) * table_stride, context_len + queries, row_mask, first_tile, last_tile,
        end, scale, soft_cap, window, k_block_stride, k_slot_stride, k_dim_stride, v_block_stride, v_slot_stride,
        v_dim_stride, ks_block_stride, ks_slot_stride, vs_block_stride, vs_slot_stride, HEAD_SIZE, HEAD_MAIN,
        HEAD_REST, VALUE_SIZE, VALUE_PAD, BLOCK_SIZE, TILE, HAS_WINDOW, HAS_SOFT_CAP, HAS_ALIBI, SCALED, VALUE_IS_KEY,
    )  # fmt: skip
    out_rows = tokens * num_heads + heads
    if SPLIT:
        out_rows = out_rows * tl.num_programs(2) + tl.program_id(2)
        tl.store(stats_ptr + out_rows * 2, maximum, mask=row_mask)
        tl.store(stats_ptr + out_rows * 2 + 1, denominator, mask=row_mask)
        _store_features(partial_ptr, out_rows, row_mask, acc, VALUE_SIZE)
    else:
        _store_features(out_ptr, out_rows, row_mask, acc / denominator[:, None], VALUE_SIZE)


@triton.jit
def _load_features(
    rows: tl.tensor, row_mask: tl.tensor, FIRST: tl.constexpr, COUNT: tl.constexpr, HEAD_SIZE: tl.constexpr
) -> tl.tensor:
    dims = FIRST + tl.arange(0, COUNT)
    mask = row_mask[:, None] & (dims < HEAD_SIZE)[None, :]
    return tl.load(rows[:, None] + dims[None, :], mask=mask, other=0.0)


@triton.jit
def _store_features(
    ptr: tl.tensor, rows: tl.tensor, row_mask: tl.tensor, x: tl.tensor, VALUE_SIZE: tl.constexpr
) -> None:
    dims = tl.arange(0, x.shape[1])
    mask = row_mask[:, None] & (dims < VALUE_SIZE)[None, :]
    tl.store(ptr + rows[:, None] * VALUE_SIZE + dims[None, :], x.to(ptr.dtype.element_ty), mask=mask)


def constants(
    launch: AttentionLaunch, group: int, head_size: int, block_size: int, value_size: int, value_is_key: bool = False
) -> dict[str, Any]:
    """The compile-time arguments that follow from the model and the launch row."""
    main, rest = head_parts(head_size)
    num_tiles = triton.cdiv(group, launch.block_m)
    return {
        "GROUP": group,
        "HEADS": triton.cdiv(group, num_tiles),
        "HEAD_SIZE": head_size,
        "HEAD_MAIN": main,
        "HEAD_REST": rest,
        "VALUE_SIZE": value_size,
        "VALUE_PAD": triton.next_power_of_2(value_size),
        "BLOCK_SIZE": block_size,
        "BLOCK_M": launch.block_m,
        "TILE": launch.tile,
        "VALUE_IS_KEY": value_is_key and value_size == main,
    }


def head_parts(head_size: int) -> tuple[int, int]:
    """(main, rest): powers of two that cover a head; padding to one would waste much of the larger ones."""
    padded = triton.next_power_of_2(head_size)
    if padded == head_size or padded <= 128:
        return padded, 0
    return padded // 2, max(16, triton.next_power_of_2(head_size - padded // 2))


def paged_attention(
    query: Tensor,
    cache: KVCache,
    batch: AttentionBatch,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float = 0.0,
    *,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
) -> Tensor:
    """``reference.paged_attention``: query [T,H,D] over a cache of any strides -> [T,H,Dv], contiguous."""
    num_kv_heads = cache.key.shape[2]
    group = query.shape[1] // num_kv_heads
    phase = "decode" if batch.max_query_len * group <= 16 else "prefill"
    size = max(query.shape[2], cache.value.shape[3])
    arch = device_arch(query.device)
    launch = attention_launch(arch, phase, size, query.element_size(), scaled=cache.is_scaled)
    heads = triton.cdiv(group, triton.cdiv(group, launch.block_m))
    splits = 1
    if batch.max_query_len <= launch.block_m // heads:
        programs = num_kv_heads * triton.cdiv(group, heads)
        splits = num_splits(batch, programs, sliding_window, num_cores(query.device))
    return launch_attention(
        query, cache, batch, scale, sliding_window, soft_cap, sinks, alibi_slopes, launch=launch, splits=splits
    )


def launch_attention(
    query: Tensor,
    cache: KVCache,
    batch: AttentionBatch,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    *,
    launch: AttentionLaunch,
    splits: int,
) -> Tensor:
    """``paged_attention`` with the launch row and the number of splits given."""
    if query.stride(-1) != 1:
        query = query.contiguous()
    num_tokens, num_heads, head_size = query.shape
    num_kv_heads, value_size = cache.value.shape[2:]
    out = torch.empty((num_tokens, num_heads, value_size), dtype=query.dtype, device=query.device)
    if num_tokens == 0:
        return out
    group = num_heads // num_kv_heads
    same = cache.value_is_key and cache.key.stride() == cache.value.stride()
    values = constants(launch, group, head_size, cache.block_size, value_size, same)
    one_token = batch.max_query_len == 1
    block_q = values["BLOCK_M"] // values["HEADS"]
    programs = batch.num_requests if one_token else num_tokens // block_q + batch.num_requests
    partial, stats = split_buffers(out, splits)
    key_scale, value_scale = _scales(cache, query)
    paged_attention_kernel[(programs, num_kv_heads * triton.cdiv(group, values["HEADS"]), splits)](
        query, cache.key, cache.value, key_scale, value_scale,
        query if sinks is None else sinks, query if alibi_slopes is None else alibi_slopes, out, partial, stats,
        batch.block_table, batch.query_start_loc, batch.seq_lens,
        scale * (2.0 / soft_cap if soft_cap else 1.0) * LOG2_E, soft_cap * LOG2_E, sliding_window or 0,
        batch.num_requests, num_heads, query.stride(0), query.stride(1), *cache.key.stride(), *cache.value.stride(),
        *key_scale.stride(), *value_scale.stride(), batch.block_table.stride(0),
        **values,
        ONE_TOKEN=one_token,
        HAS_WINDOW=sliding_window is not None,
        HAS_SOFT_CAP=soft_cap != 0.0,
        HAS_SINKS=sinks is not None,
        HAS_ALIBI=alibi_slopes is not None,
        SCALED=cache.is_scaled,
        SPLIT=splits > 1,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        **launch.options,
    )  # fmt: skip
    if splits > 1:
        reduce_splits(partial, stats, out, splits)
    return out


def _scales(cache: KVCache, unused: Tensor) -> tuple[Tensor, Tensor]:
    """Scales of keys and values [N,S,G]; without any, something with three strides that is not read."""
    if cache.key_scale is None or cache.value_scale is None:
        return unused, unused
    return cache.key_scale, cache.value_scale
