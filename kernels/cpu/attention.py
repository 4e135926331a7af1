"""Attention over a block table in C, float32."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ..attention_batch import AttentionBatch
from .library import functions

_Sizes = ctypes.c_ssize_t * 17


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
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
    assert num_heads % key_cache.shape[2] == 0, "query heads must be a multiple of the KV heads"
    assert table.stride(1) == 1 and table.dtype is torch.int32, "block_table must be int32 with contiguous rows"
    out = torch.empty((num_tokens, num_heads, head_size))
    sizes = _Sizes(
        num_heads,
        key_cache.shape[2],
        head_size,
        key_cache.shape[1],
        batch.num_requests,
        table.stride(0),
        sliding_window or 0,
        query.stride(0),
        query.stride(1),
        *key_cache.stride(),
        *value_cache.stride(),
    )
    functions.twofold_paged_attention(
        query.data_ptr(),
        key_cache.data_ptr(),
        value_cache.data_ptr(),
        out.data_ptr(),
        batch.query_start_loc.data_ptr(),
        batch.seq_lens.data_ptr(),
        table.data_ptr(),
        sizes,
        scale,
        soft_cap,
    )
    return out


def write_kv(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """``reference.write_kv`` for float32."""
    assert key_cache.dtype is value_cache.dtype is torch.float32, "the C kernel writes float32 caches"
    key, value = (part if part.stride(2) == 1 else part.contiguous() for part in (key, value))
    sizes = (ctypes.c_ssize_t * 16)(
        *key.shape,
        key_cache.shape[1],
        *key.stride()[:2],
        *value.stride()[:2],
        *key_cache.stride(),
        *value_cache.stride(),
    )
    functions.twofold_write_kv(
        key.data_ptr(),
        value.data_ptr(),
        key_cache.data_ptr(),
        value_cache.data_ptr(),
        slot_mapping.data_ptr(),
        sizes,
    )
