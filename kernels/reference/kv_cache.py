"""Writing and copying in the paged KV cache."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kv_layout import KVCache


def write_kv(key: Tensor, value: Tensor, cache: KVCache, slot_mapping: Tensor) -> None:
    """Store key and value [T,G,D] at slots ``block * S + offset`` (int64 [T]) of the cache."""
    block_size = cache.block_size
    blocks = torch.div(slot_mapping, block_size, rounding_mode="floor")
    offsets = slot_mapping - blocks * block_size
    cache.key[blocks, offsets] = key.to(cache.key.dtype)
    cache.value[blocks, offsets] = value.to(cache.value.dtype)


def copy_blocks(caches: list[Tensor], pairs: list[tuple[int, int]]) -> None:
    """In each cache [N,S,G,D] copy block ``source`` over block ``target`` for each (source, target).

    All sources are read before any target is written.
    """
    if not pairs:
        return
    sources, targets = (list(column) for column in zip(*pairs, strict=True))
    for cache in caches:
        cache[targets] = cache[sources]
