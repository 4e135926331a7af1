"""Attention over a block table in C, float32."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ..attention_batch import AttentionBatch
from ..kv_layout import KVCache
from .library import functions

_Sizes = ctypes.c_ssize_t * 17


def paged_attention(
    query: Tensor,
    cache: KVCache,
    batch: AttentionBatch,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float = 0.0,
) -> Tensor:
    """``reference.paged_attention`` for float32. Contexts are read in place, without a copy."""
    if query.stride(2) != 1:
        query = query.contiguous()
    num_tokens, num_heads, head_size = query.shape
    table = batch.block_table
    assert num_heads % cache.key.shape[2] == 0, "query heads must be a multiple of the KV heads"
    assert table.stride(1) == 1 and table.dtype is torch.int32, "block_table must be int32 with contiguous rows"
    out = torch.empty((num_tokens, num_heads, head_size))
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
        *cache.key.stride(),
        *cache.value.stride(),
    )
    functions.twofold_paged_attention(
        query.data_ptr(),
        cache.key.data_ptr(),
        cache.value.data_ptr(),
        out.data_ptr(),
        batch.query_start_loc.data_ptr(),
        batch.seq_lens.data_ptr(),
        table.data_ptr(),
        sizes,
        scale,
        soft_cap,
    )
    return out


def write_kv(key: Tensor, value: Tensor, cache: KVCache, slot_mapping: Tensor) -> None:
    """``reference.write_kv`` for float32."""
    assert cache.key.dtype is cache.value.dtype is torch.float32, "the C kernel writes float32 caches"
    key, value = (part if part.stride(2) == 1 else part.contiguous() for part in (key, value))
    sizes = (ctypes.c_ssize_t * 16)(
        *key.shape,
        cache.block_size,
        *key.stride()[:2],
        *value.stride()[:2],
        *cache.key.stride(),
        *cache.value.stride(),
    )
    functions.twofold_write_kv(
        key.data_ptr(),
        value.data_ptr(),
        cache.key.data_ptr(),
        cache.value.data_ptr(),
        slot_mapping.data_ptr(),
        sizes,
    )
