"""Writing and copying in the paged KV cache."""

from __future__ import annotations

import torch
from torch import Tensor

from ...platforms.fp8 import fp8_max
from ..kv_layout import KVCache
from .elementwise import rms_norm, rope
from .precision import wide

SMALLEST_SCALE = 2.0**-100
"""What a row of zeros is divided by."""


def write_kv(key: Tensor, value: Tensor, cache: KVCache, slot_mapping: Tensor) -> None:
    """Store key [T,G,D] and value [T,G,Dv] at slots ``block * S + offset`` (int64 [T]) of the cache.

    Negative slots are skipped (which is where the definition waits for the device). A scaled cache gets
    ``quantize_kv`` of each token and head, with the scales that it has if they are static. Where the cache's value is a
    view of its key, ``value`` lies in ``key`` and only that is written.
    """
    written = slot_mapping >= 0
    slots = slot_mapping[written]
    blocks = torch.div(slots, cache.block_size, rounding_mode="floor")
    place = blocks, slots - blocks * cache.block_size
    _write(key[written], cache.key, cache.key_scale, cache.static_scales, place)
    if not cache.value_is_key:
        _write(value[written], cache.value, cache.value_scale, cache.static_scales, place)


def _write(x: Tensor, target: Tensor, scales: Tensor | None, static: bool, place: tuple[Tensor, Tensor]) -> None:
    if scales is None:
        target[place] = x.to(target.dtype)
    elif static:
        target[place] = quantize_kv(x, target.dtype, scales[place])[0]
    else:
        target[place], scales[place] = quantize_kv(x, target.dtype)


def kv_limit(dtype: torch.dtype) -> float:
    """The largest code that a scaled cache type holds."""
    return 127.0 if dtype is torch.int8 else fp8_max(dtype)


def quantize_kv(x: Tensor, dtype: torch.dtype, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x [...,D] -> (codes [...,D] in int8 or fp8, scale float32 [...]), with ``codes * scale`` near x.

    Without a scale it is each row's largest magnitude over the type's limit. Codes are rounded to nearest, ties to
    even, and saturate.
    """
    values, limit = wide(x), kv_limit(dtype)
    if scale is None:
        scale = (values.abs().amax(-1) / limit).clamp(min=SMALLEST_SCALE)
    codes = (values / scale[..., None]).clamp(-limit, limit)
    return (codes.round() if dtype is torch.int8 else codes).to(dtype), scale.float()


def dequantize_kv(codes: Tensor, scale: Tensor | None) -> Tensor:
    """codes [...,D] of a cache in float32 (float64 as it is), times scale [...] if the cache is scaled."""
    values = codes.float() if codes.dtype is not torch.float64 else codes
    return values if scale is None else values * scale[..., None]


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
    """``rms_norm`` of each head where weights [D] are given, ``rope``, ``write_kv``; the rotated q [T,H,D].

    A faster kernel may do it in place and rounds only once.
    """
    q, k = wide(q), wide(k)
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm(q, q_norm, eps, norm_offset), rms_norm(k, k_norm, eps, norm_offset)
    rotated, k = rope(q, k, cos_sin, positions, interleaved)
    write_kv(k, v, cache, slot_mapping)
    return rotated.to(v.dtype)


def copy_blocks(caches: list[Tensor], pairs: list[tuple[int, int]]) -> None:
    """In each cache [N,...] copy block ``source`` over block ``target`` for each (source, target).

    All sources are read before any target is written.
    """
    if not pairs:
        return
    sources, targets = (list(column) for column in zip(*pairs, strict=True))
    for cache in caches:
        cache[targets] = cache[sources]
