"""Writing and copying in the paged KV cache."""

from __future__ import annotations

import torch
from torch import Tensor


def write_kv(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """Store key and value [T,G,D] at slots ``block * S + offset`` (int64 [T]) of the caches [N,S,G,D]."""
    block_size = key_cache.shape[1]
    blocks = torch.div(slot_mapping, block_size, rounding_mode="floor")
    offsets = slot_mapping - blocks * block_size
    key_cache[blocks, offsets] = key.to(key_cache.dtype)
    value_cache[blocks, offsets] = value.to(value_cache.dtype)


def copy_blocks(caches: list[Tensor], pairs: list[tuple[int, int]]) -> None:
    """In each cache [N,S,G,D] copy block ``source`` over block ``target`` for each (source, target).

    All sources are read before any target is written.
    """
    if not pairs:
        return
    sources, targets = (list(column) for column in zip(*pairs, strict=True))
    for cache in caches:
        cache[targets] = cache[sources]
