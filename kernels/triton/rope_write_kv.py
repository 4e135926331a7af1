"""Rotary embedding of queries and keys and the write into the cache in one launch, with the norms of their heads.

Queries are rotated in place; rotated keys go to the cache and nowhere else, which saves writing them and reading them
back, and two launches (five with norms). Everything between loading a head and storing it is in float32.

Cost per token: reads and writes H D elements of queries, reads G (D + Dv) and writes as many of the cache's type, reads
R float32 of the table; 3 (H + G) R operations, norms 4 (H + G) D. A negative slot's key and value are not written.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ..kv_layout import KVCache
from .kv_codes import code_constants, copy_heads, head_scales, scale_tensors, store_features
from .launch_table import row_launch
from .runtime import device_arch


# fmt: off
@triton.jit
def rope_write_kv_kernel(
    q_ptr: tl.tensor, k_ptr: tl.tensor, v_ptr: tl.tensor, q_norm_ptr: tl.tensor, k_norm_ptr: tl.tensor,
    cos_sin_ptr: tl.tensor, positions_ptr: tl.tensor, slot_mapping_ptr: tl.tensor,
    key_cache_ptr: tl.tensor, value_cache_ptr: tl.tensor, key_scale_ptr: tl.tensor, value_scale_ptr: tl.tensor,
    num_heads: tl.tensor, num_kv_heads: tl.tensor, block_size: tl.tensor, eps: tl.tensor, norm_offset: tl.tensor,
    q_token_stride: tl.tensor, q_head_stride: tl.tensor, k_token_stride: tl.tensor, k_head_stride: tl.tensor,
    v_token_stride: tl.tensor, v_head_stride: tl.tensor, cos_sin_stride: tl.tensor,
    kc_block_stride: tl.tensor, kc_slot_stride: tl.tensor, kc_head_stride: tl.tensor, kc_dim_stride: tl.tensor,
    vc_block_stride: tl.tensor, vc_slot_stride: tl.tensor, vc_head_stride: tl.tensor, vc_dim_stride: tl.tensor,
    ks_block_stride: tl.tensor, ks_slot_stride: tl.tensor, ks_head_stride: tl.tensor,
    vs_block_stride: tl.tensor, vs_slot_stride: tl.tensor, vs_head_stride: tl.tensor,
    HALF: tl.constexpr, HALF_PAD: tl.constexpr, HEAD_SIZE: tl.constexpr, REST_PAD: tl.constexpr,
    VALUE_SIZE: tl.constexpr, VALUE_PAD: tl.constexpr, BLOCK_HEADS: tl.constexpr, INTERLEAVED: tl.constexpr,
    HAS_NORM: tl.constexpr, SCALING: tl.constexpr, LIMIT: tl.constexpr,
) -> None:
    # fmt: on
    # Program axis 1 walks the blocks of query heads, then those of key heads.
    token = tl.program_id(0).to(tl.int64)
    num_q_blocks = tl.cdiv(num_heads, BLOCK_HEADS)
    is_key = tl.program_id(1) >= num_q_blocks
    table = cos_sin_ptr + tl.load(positions_ptr + token) * cos_sin_stride
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    if is_key:
        slot = tl.load(slot_mapping_ptr + token)
        if slot < 0:
            return
        heads -= num_q_blocks * BLOCK_HEADS
        mask = heads < num_kv_heads
        rows = k_ptr + token * k_token_stride + heads * k_head_stride
        a, b, rest = _turned(
            rows, mask, table, k_norm_ptr, eps, norm_offset, HALF, HALF_PAD, HEAD_SIZE, REST_PAD, INTERLEAVED, HAS_NORM
        )
        block = slot // block_size
        offset = slot % block_size
        places = key_cache_ptr + block * kc_block_stride + offset * kc_slot_stride + heads * kc_head_stride
        scale_ptrs = key_scale_ptr + block * ks_block_stride + offset * ks_slot_stride + heads * ks_head_stride
        largest = tl.maximum(tl.max(tl.abs(a), axis=1), tl.max(tl.abs(b), axis=1))
        if REST_PAD > 0:
            largest = tl.maximum(largest, tl.max(tl.abs(rest), axis=1))
        scales = head_scales(largest, scale_ptrs, mask, SCALING, LIMIT)
        _store_parts(
            places, kc_dim_stride, mask, a, b, rest, scales, HALF, HEAD_SIZE, REST_PAD, INTERLEAVED, SCALING, LIMIT
        )
        rows = v_ptr + token * v_token_stride + heads * v_head_stride
        places = value_cache_ptr + block * vc_block_stride + offset * vc_slot_stride + heads * vc_head_stride
        scale_ptrs = value_scale_ptr + block * vs_block_stride + offset * vs_slot_stride + heads * vs_head_stride
        copy_heads(rows, places, vc_dim_stride, scale_ptrs, mask, VALUE_SIZE, VALUE_PAD, SCALING, LIMIT)
    else:
        mask = heads < num_heads
        rows = q_ptr + token * q_token_stride + heads * q_head_stride
        a, b, rest = _turned(
            rows, mask, table, q_norm_ptr, eps, norm_offset, HALF, HALF_PAD, HEAD_SIZE, REST_PAD, INTERLEAVED, HAS_NORM
        )
        # What is not rotated changes only by the norm.
        WRITTEN: tl.constexpr = REST_PAD if HAS_NORM else 0
        _store_parts(rows, 1, mask, a, b, rest, a, HALF, HEAD_SIZE, WRITTEN, INTERLEAVED, "none", 1.0)


@triton.jit
def _turned(
    rows: tl.tensor,
    head_mask: tl.tensor,
    table: tl.tensor,
    norm_ptr: tl.tensor,
    eps: tl.tensor,
    norm_offset: tl.tensor,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    REST_PAD: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_NORM: tl.constexpr,
) -> Any:
    """(first, second of the rotated pairs, the features behind them) of heads, normalized if asked; float32."""
    pairs = tl.arange(0, HALF_PAD)
    first, second = _pair_places(pairs, HALF, INTERLEAVED)
    pair_mask = pairs < HALF
    mask = head_mask[:, None] & pair_mask[None, :]
    a = tl.load(rows[:, None] + first[None, :], mask=mask, other=0.0).to(tl.float32)
    b = tl.load(rows[:, None] + second[None, :], mask=mask, other=0.0).to(tl.float32)
    rest = a
    if REST_PAD > 0:
        dims = 2 * HALF + tl.arange(0, REST_PAD)
        mask = head_mask[:, None] & (dims < HEAD_SIZE)[None, :]
        rest = tl.load(rows[:, None] + dims[None, :], mask=mask, other=0.0).to(tl.float32)
    if HAS_NORM:
        squares = tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)
        if REST_PAD > 0:
            squares += tl.sum(rest * rest, axis=1)
        factors = tl.rsqrt(squares / HEAD_SIZE + eps)[:, None]
        a *= factors * _weights(norm_ptr, first, pair_mask, norm_offset)
        b *= factors * _weights(norm_ptr, second, pair_mask, norm_offset)
        if REST_PAD > 0:
            rest *= factors * _weights(norm_ptr, dims, dims < HEAD_SIZE, norm_offset)
    cos = tl.load(table + pairs, mask=pair_mask, other=0.0)[None, :]
    sin = tl.load(table + HALF + pairs, mask=pair_mask, other=0.0)[None, :]
    return a * cos - b * sin, b * cos + a * sin, rest


@triton.jit
def _weights(norm_ptr: tl.tensor, dims: tl.tensor, mask: tl.tensor, norm_offset: tl.tensor) -> tl.tensor:
    return (tl.load(norm_ptr + dims, mask=mask, other=0.0).to(tl.float32) + norm_offset)[None, :]


@triton.jit
def _pair_places(pairs: tl.tensor, HALF: tl.constexpr, INTERLEAVED: tl.constexpr) -> Any:
    if INTERLEAVED:
        first = 2 * pairs
        second = first + 1
    else:
        first = pairs
        second = pairs + HALF
    return first, second


@triton.jit
def _store_parts(
    places: tl.tensor,
    dim_stride: tl.tensor,
    head_mask: tl.tensor,
    a: tl.tensor,
    b: tl.tensor,
    rest: tl.tensor,
    scales: tl.tensor,
    HALF: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    REST_PAD: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    SCALING: tl.constexpr,
    LIMIT: tl.constexpr,
) -> None:
    """What ``_turned`` gave, at the heads' places; REST_PAD 0: without the features behind the pairs."""
    pairs = tl.arange(0, a.shape[1])
    first, second = _pair_places(pairs, HALF, INTERLEAVED)
    mask = head_mask[:, None] & (pairs < HALF)[None, :]
    store_features(a, scales, places[:, None] + first[None, :] * dim_stride, mask, SCALING, LIMIT)
    store_features(b, scales, places[:, None] + second[None, :] * dim_stride, mask, SCALING, LIMIT)
    if REST_PAD > 0:
        dims = 2 * HALF + tl.arange(0, REST_PAD)
        mask = head_mask[:, None] & (dims < HEAD_SIZE)[None, :]
        store_features(rest, scales, places[:, None] + dims[None, :] * dim_stride, mask, SCALING, LIMIT)


def constants(rotary_size: int, head_size: int, value_size: int, interleaved: bool) -> dict[str, Any]:
    """The compile-time arguments for ``rotary_size`` rotated elements per head."""
    half, rest = rotary_size // 2, head_size - rotary_size
    half_pad = triton.next_power_of_2(half)
    return {
        "HALF": half,
        "HALF_PAD": half_pad,
        "HEAD_SIZE": head_size,
        "REST_PAD": triton.next_power_of_2(rest) if rest else 0,
        "VALUE_SIZE": value_size,
        "VALUE_PAD": triton.next_power_of_2(value_size),
        "BLOCK_HEADS": max(1, 512 // half_pad),
        "INTERLEAVED": interleaved,
    }


def rope_write_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    interleaved: bool,
    cache: KVCache,
    slot_mapping: Tensor,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    norm_offset: float = 0.0,
) -> Tensor:
    """``reference.rope_write_kv``: q [T,H,D] in place (copied first where its last dimension is strided)."""
    q, k, v = (part if part.stride(-1) == 1 else part.contiguous() for part in (q, k, v))
    num_tokens, num_heads, head_size = q.shape
    if num_tokens == 0:
        return q
    values = constants(cos_sin.shape[-1], head_size, v.shape[2], interleaved)
    num_blocks = sum(triton.cdiv(part.shape[1], values["BLOCK_HEADS"]) for part in (q, k))
    key_scale, value_scale, scale_strides = scale_tensors(cache)
    rope_write_kv_kernel[(num_tokens, num_blocks)](
        q, k, v, q if q_norm is None else q_norm, k if k_norm is None else k_norm, cos_sin, positions, slot_mapping,
        cache.key, cache.value, key_scale, value_scale,
        num_heads, k.shape[1], cache.block_size, eps, norm_offset,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], cos_sin.stride(0),
        *cache.key.stride(), *cache.value.stride(), *scale_strides,
        **values,
        **code_constants(cache.key.dtype, static=cache.static_scales),
        HAS_NORM=q_norm is not None,
        num_warps=row_launch(device_arch(q.device), 1).num_warps,
    )  # fmt: skip
    return q
