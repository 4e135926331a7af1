"""The walk of a tile of query rows over one request's cached tokens, which attention kernels call.

Types of the two products: queries and probabilities are in the query's type, and a tile of the cache is cast to it:
exact for int8 and e4m3 codes in bf16 and fp16, so that no product is ever in fp8 and none is emulated. float32 queries
multiply in IEEE float32. A key's scale is applied to its column of scores and a value's to its column of
probabilities, in float32, so that no dequantized tile exists. float16 probabilities times small scales would lose
their bits; there the scales are divided by the tile's largest, and the product multiplied by it.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl


@triton.jit
def locate(
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
def tile_range(
    first_position: tl.tensor,
    end: tl.tensor,
    window: tl.tensor,
    TILE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
) -> Any:
    """(first, last) tile of cached tokens for rows from ``first_position`` on, or this split's share of them."""
    first_tile = first_position * 0
    if HAS_WINDOW:
        first_tile = tl.maximum(first_position - window + 1, 0) // TILE
    last_tile = tl.cdiv(end, TILE)
    if SPLIT:
        tiles_per_split = tl.cdiv(last_tile - first_tile, tl.num_programs(2))
        first_tile += tl.program_id(2) * tiles_per_split
        last_tile = tl.minimum(first_tile + tiles_per_split, last_tile)
    return first_tile, last_tile


@triton.jit
def start_rows(sinks_ptr: tl.tensor, heads: tl.tensor, row_mask: tl.tensor, HAS_SINKS: tl.constexpr) -> Any:
    """(maximum, denominator) of rows that have seen nothing but their sink, which the first split alone counts."""
    maximum = tl.full(heads.shape, float("-inf"), dtype=tl.float32)
    denominator = tl.zeros(heads.shape, dtype=tl.float32)
    if HAS_SINKS:
        sinks = tl.load(sinks_ptr + heads, mask=row_mask, other=float("-inf")).to(tl.float32)
        maximum = tl.where(tl.program_id(2) == 0, sinks * 1.4426950408889634, float("-inf"))
        denominator = tl.where(maximum > float("-inf"), 1.0, 0.0)
    return maximum, denominator


# fmt: off
@triton.jit
def attend(
    q: tl.tensor, q_rest: tl.tensor, maximum: tl.tensor, denominator: tl.tensor, slopes: tl.tensor,
    key_ptr: tl.tensor, value_ptr: tl.tensor, key_scale_ptr: tl.tensor, value_scale_ptr: tl.tensor,
    table_ptr: tl.tensor, positions: tl.tensor, row_mask: tl.tensor,
    first_tile: tl.tensor, last_tile: tl.tensor, end: tl.tensor,
    scale: tl.tensor, soft_cap: tl.tensor, window: tl.tensor,
    k_block_stride: tl.tensor, k_slot_stride: tl.tensor, k_dim_stride: tl.tensor,
    v_block_stride: tl.tensor, v_slot_stride: tl.tensor, v_dim_stride: tl.tensor,
    ks_block_stride: tl.tensor, ks_slot_stride: tl.tensor, vs_block_stride: tl.tensor, vs_slot_stride: tl.tensor,
    HEAD_SIZE: tl.constexpr, HEAD_MAIN: tl.constexpr, HEAD_REST: tl.constexpr,
    VALUE_SIZE: tl.constexpr, VALUE_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFT_CAP: tl.constexpr, HAS_ALIBI: tl.constexpr,
    SCALED: tl.constexpr, VALUE_IS_KEY: tl.constexpr,
) -> Any:
    # fmt: on
    """Online softmax of the rows ``q`` over tiles of one request's tokens: (unnormalized sum, maximum, denominator).

    A head is HEAD_MAIN features in ``q`` and HEAD_REST more in ``q_rest``, powers of two that together cover it.
    """
    dims = tl.arange(0, HEAD_MAIN)
    value_dims = tl.arange(0, VALUE_PAD)
    acc = tl.zeros([q.shape[0], VALUE_PAD], dtype=tl.float32)
    for tile in range(first_tile, last_tile):
        columns = tile * TILE + tl.arange(0, TILE)
        column_mask = columns < end
        blocks = tl.load(table_ptr + columns // BLOCK_SIZE, mask=column_mask, other=0).to(tl.int64)
        slots = columns % BLOCK_SIZE
        keys = key_ptr + (blocks * k_block_stride + slots * k_slot_stride)[None, :]
        mask = column_mask[None, :] & (dims < HEAD_SIZE)[:, None]
        k = tl.load(keys + (dims * k_dim_stride)[:, None], mask=mask, other=0.0).to(q.dtype)
        scores = tl.dot(q, k, input_precision="ieee")
        if HEAD_REST > 0:
            rest = HEAD_MAIN + tl.arange(0, HEAD_REST)
            mask = column_mask[None, :] & (rest < HEAD_SIZE)[:, None]
            k_rest = tl.load(keys + (rest * k_dim_stride)[:, None], mask=mask, other=0.0)
            scores = tl.dot(q_rest, k_rest.to(q.dtype), scores, input_precision="ieee")
        if SCALED:
            places = key_scale_ptr + blocks * ks_block_stride + slots * ks_slot_stride
            scores = scores * tl.load(places, mask=column_mask, other=0.0)[None, :]
        scores = _finish_scores(
            scores * scale, columns, positions, row_mask, slopes, soft_cap, window, HAS_SOFT_CAP, HAS_ALIBI, HAS_WINDOW
        )
        new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
        # A row that has seen nothing yet has maximum -inf; 0 keeps the exponents from becoming nan.
        finite_maximum = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weights = tl.exp2(scores - finite_maximum[:, None])
        correction = tl.exp2(maximum - finite_maximum)
        denominator = denominator * correction + tl.sum(weights, axis=1)
        maximum = new_maximum
        if VALUE_IS_KEY:
            v = tl.trans(k)
        else:
            values = value_ptr + (blocks * v_block_stride + slots * v_slot_stride)[:, None]
            mask = column_mask[:, None] & (value_dims < VALUE_SIZE)[None, :]
            v = tl.load(values + (value_dims * v_dim_stride)[None, :], mask=mask, other=0.0).to(q.dtype)
        places = value_scale_ptr + blocks * vs_block_stride + slots * vs_slot_stride
        acc = _add_values(acc * correction[:, None], weights, v, places, column_mask, SCALED)
    return acc, maximum, denominator


@triton.jit
def _add_values(
    acc: tl.tensor,
    weights: tl.tensor,
    v: tl.tensor,
    scale_ptrs: tl.tensor,
    column_mask: tl.tensor,
    SCALED: tl.constexpr,
) -> tl.tensor:
    """acc + weights @ (v * scale)."""
    if SCALED:
        scales = tl.load(scale_ptrs, mask=column_mask, other=0.0)
        if v.dtype == tl.float16:
            # Scales are positive, and a tile of the range has a token.
            largest = tl.max(scales, axis=0)
            weights = weights * (scales / largest)[None, :]
            acc += tl.dot(weights.to(v.dtype), v, input_precision="ieee") * largest
        else:
            acc = tl.dot((weights * scales[None, :]).to(v.dtype), v, acc, input_precision="ieee")
    else:
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
    return acc


@triton.jit
def _finish_scores(
    scores: tl.tensor,
    columns: tl.tensor,
    positions: tl.tensor,
    row_mask: tl.tensor,
    slopes: tl.tensor,
    soft_cap: tl.tensor,
    window: tl.tensor,
    HAS_SOFT_CAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
) -> tl.tensor:
    """Scores in base 2, -inf where a row may not look."""
    if HAS_SOFT_CAP:
        # cap * tanh(s / cap): ``scores`` is 2 s / cap and ``soft_cap`` the cap, both times log2(e)
        scores = soft_cap * (1.0 - 2.0 / (tl.exp2(scores) + 1.0))
    if HAS_ALIBI:
        scores += slopes[:, None] * (columns[None, :] - positions[:, None]).to(tl.float32)
    visible = row_mask[:, None] & (columns[None, :] <= positions[:, None])
    if HAS_WINDOW:
        visible = visible & (columns[None, :] > positions[:, None] - window)
    return tl.where(visible, scores, float("-inf"))
