"""Operations that stand for several neighbours of a layer, in one call into C.

Between two kernels of a decode step the interpreter runs with cold caches, because the weights have just passed through
them; so each call saved is worth far more than a call costs in a loop of its own.
"""

from __future__ import annotations

import ctypes
import functools

from torch import Tensor

from ..attention_batch import AttentionBatch
from ..kv_layout import KVCache
from . import step_memory
from .cache_sizes import NUM_SIZES, cache_pointers, cache_sizes
from .library import functions

_Sizes = ctypes.c_ssize_t * (6 + NUM_SIZES)


def rope_write_attend(
    qkv: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    cache: KVCache,
    batch: AttentionBatch,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float = 0.0,
) -> Tensor:
    """``rope`` (two halves), ``write_kv`` and ``paged_attention``: qkv [T,(H+2G)D] float32, overwritten -> [T,HD]."""
    if not qkv.is_contiguous():
        qkv = qkv.contiguous()
    sizes, width = _sizes(
        qkv.shape[1],
        cache.key.shape[1:],
        cos_sin.shape[1],
        sliding_window or 0,
        cache_sizes(cache),
    )
    tokens, table = qkv.shape[0], batch.block_table
    out = step_memory.empty((tokens, width))
    functions.twofold_rope_write_attend(
        qkv.data_ptr(),
        tokens,
        cos_sin.data_ptr(),
        positions.data_ptr(),
        *cache_pointers(cache),
        batch.slot_mapping.data_ptr(),
        out.data_ptr(),
        batch.query_start_loc.data_ptr(),
        batch.seq_lens.data_ptr(),
        table.data_ptr(),
        batch.num_requests,
        table.stride(0),
        sizes,
        scale,
        soft_cap,
    )
    return out


@functools.lru_cache(maxsize=256)
def _sizes(
    qkv_width: int,
    cache_shape: tuple[int, int, int],
    rotary_size: int,
    window: int,
    cache: tuple[int, ...],
) -> tuple[ctypes.Array[ctypes.c_ssize_t], int]:
    """The kernel's sizes, and HD."""
    block_size, kv_heads, head_size = cache_shape
    heads = qkv_width // head_size - 2 * kv_heads
    assert heads > 0 and heads % kv_heads == 0, "query heads must be a multiple of the KV heads"
    sizes = _Sizes(heads, kv_heads, head_size, block_size, window, rotary_size // 2, *cache)
    return sizes, heads * head_size
