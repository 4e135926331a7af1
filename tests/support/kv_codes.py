"""8-bit KV caches by their definition in plain torch: what a code is, and attention cases whose context is in codes."""

from __future__ import annotations

import dataclasses

import torch
from attention_cases import AttentionCase
from torch import Tensor
from twofold.kernels.kv_layout import KVCache, allocate_kv_cache

LIMITS = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
DTYPES = list(LIMITS)


def codes_of(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """x [..., D] divided by scale [...], the nearest code of the dtype (ties to even), no further than its limit."""
    limit = LIMITS[dtype]
    ratio = (x.float() / scale[..., None]).clamp(-limit, limit)
    return ratio.round().to(dtype) if dtype is torch.int8 else ratio.to(dtype)


def scales_of(x: Tensor, dtype: torch.dtype) -> Tensor:
    """One per row of x [..., D]: the largest magnitude becomes the dtype's limit."""
    return (x.float().abs().amax(-1) / LIMITS[dtype]).clamp(min=2.0**-100)


def rounded(x: Tensor, dtype: torch.dtype, scale: Tensor | None = None) -> Tensor:
    """What a cache of the dtype gives back for x [..., D]; with scales of its own, or given ones [...]."""
    scale = scales_of(x, dtype) if scale is None else scale.expand(x.shape[:-1])
    return codes_of(x, scale, dtype).float() * scale[..., None]


def in_codes(
    case: AttentionCase, dtype: torch.dtype, scales: tuple[Tensor, Tensor] | None = None
) -> tuple[KVCache, AttentionCase]:
    """A cache that holds the case's context in codes, and the case with the values that those codes stand for."""
    num_blocks, block_size, num_kv_heads, head_size = case.key_cache.shape
    cache = allocate_kv_cache(num_blocks, block_size, num_kv_heads, head_size, dtype, "cpu", static_scales=scales)
    stored = []
    for index, (source, target, scale) in enumerate(
        ((case.key_cache, cache.key, cache.key_scale), (case.value_cache, cache.value, cache.value_scale))
    ):
        assert scale is not None
        clean = source.nan_to_num(0.0)
        if scales is None:
            scale.copy_(scales_of(clean, dtype))
        target.copy_(codes_of(clean, scale, dtype))
        given = None if scales is None else scales[index]
        stored.append([rounded(x, dtype, given) for x in (case.keys, case.values)[index]])
    return cache, dataclasses.replace(case, keys=stored[0], values=stored[1])
