"""Attention over a block table in C: float32 activations; float32, bfloat16 or 8-bit caches."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ..attention_batch import AttentionBatch
from ..kv_layout import KVCache
from . import step_memory
from .cache_sizes import NUM_SIZES, cache_pointers, cache_sizes
from .library import functions

_Sizes = ctypes.c_ssize_t * 9
_WriteSizes = ctypes.c_ssize_t * 8
_CacheSizes = ctypes.c_ssize_t * NUM_SIZES


def paged_attention(
    query: Tensor,
    cache: KVCache,
    batch: AttentionBatch,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float = 0.0,
) -> Tensor:
    """``reference.paged_attention`` of float32 queries. Contexts are read in place, without a copy."""
    if query.stride(2) != 1:
        query = query.contiguous()
    num_tokens, num_heads, head_size = query.shape
    table = batch.block_table
    assert num_heads % cache.key.shape[2] == 0, "query heads must be a multiple of the KV heads"
    assert table.stride(1) == 1 and table.dtype is torch.int32, "block_table must be int32 with contiguous rows"
    out = step_memory.empty((num_tokens, num_heads, head_size))
    sizes = _Sizes(
        num_heads,
        cache.key.shape[2],
        head_size,
        cache.block_size,
        batch.num_requests,
        table.stride(0),
        sliding_window or 0,
        query.stride(0),
        query.stride(1),
    )
    functions.twofold_paged_attention(
        query.data_ptr(),
        *cache_pointers(cache),
        out.data_ptr(),
        batch.query_start_loc.data_ptr(),
        batch.seq_lens.data_ptr(),
        table.data_ptr(),
        sizes,
        _CacheSizes(*cache_sizes(cache)),
        scale,
        soft_cap,
    )
    return out


def write_kv(key: Tensor, value: Tensor, cache: KVCache, slot_mapping: Tensor) -> None:
    """``reference.write_kv`` of float32 keys and values."""
    key, value = (part if part.stride(2) == 1 else part.contiguous() for part in (key, value))
    sizes = _WriteSizes(*key.shape, cache.block_size, *key.stride()[:2], *value.stride()[:2])
    functions.twofold_write_kv(
        key.data_ptr(),
        value.data_ptr(),
        *cache_pointers(cache),
        slot_mapping.data_ptr(),
        sizes,
        _CacheSizes(*cache_sizes(cache)),
    )
