"""What a cache stores for a tile of heads: the values themselves, or codes with a scale per head.

``SCALING`` is ``none``; ``dynamic``, where each head's scale is its largest magnitude over ``LIMIT`` and is stored; or
``static``, where the scales are there and codes saturate at ``LIMIT``. ``LIMIT`` is 127 for int8, 448 for e4m3fn, 224
for e4m3fnuz.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kv_layout import KVCache
from ..reference.kv_cache import kv_limit
from .quantize_codes import round_even


@triton.jit
def head_scales(
    largest: tl.tensor, scale_ptrs: tl.tensor, mask: tl.tensor, SCALING: tl.constexpr, LIMIT: tl.constexpr
) -> tl.tensor:
    """The scale of each head, stored if it is new."""
    # 2^-100 in place of zero: nothing divided by it overflows.
    scales = tl.maximum(largest / LIMIT, 7.888609052210118e-31)
    if SCALING == "dynamic":
        tl.store(scale_ptrs, scales, mask=mask)
    if SCALING == "static":
        scales = tl.load(scale_ptrs, mask=mask, other=1.0)
    return scales


@triton.jit
def store_features(
    x: tl.tensor,
    scales: tl.tensor,
    places: tl.tensor,
    mask: tl.tensor,
    SCALING: tl.constexpr,
    LIMIT: tl.constexpr,
) -> None:
    """x float32 [heads, features] at ``places`` in the type that lies there, divided by scales [heads]."""
    if SCALING != "none":
        x = tl.minimum(tl.maximum(x / scales[:, None], -LIMIT), LIMIT)
        if places.dtype.element_ty == tl.int8:
            x = round_even(x)
    tl.store(places, x.to(places.dtype.element_ty), mask=mask)


@triton.jit
def copy_heads(
    rows: tl.tensor,
    cache_rows: tl.tensor,
    dim_stride: tl.tensor,
    scale_ptrs: tl.tensor,
    head_mask: tl.tensor,
    SIZE: tl.constexpr,
    PAD: tl.constexpr,
    SCALING: tl.constexpr,
    LIMIT: tl.constexpr,
) -> None:
    """The features of each head at ``rows`` to ``cache_rows``."""
    dims = tl.arange(0, PAD)
    mask = head_mask[:, None] & (dims < SIZE)[None, :]
    x = tl.load(rows[:, None] + dims[None, :], mask=mask, other=0.0).to(tl.float32)
    scales = head_scales(tl.max(tl.abs(x), axis=1), scale_ptrs, head_mask, SCALING, LIMIT)
    store_features(x, scales, cache_rows[:, None] + dims[None, :] * dim_stride, mask, SCALING, LIMIT)


def code_constants(dtype: torch.dtype, *, static: bool = False) -> dict[str, Any]:
    """The compile-time arguments for a cache of ``dtype``."""
    if dtype.itemsize > 1:
        return {"SCALING": "none", "LIMIT": 1.0}
    return {"SCALING": "static" if static else "dynamic", "LIMIT": kv_limit(dtype)}


def scale_tensors(cache: KVCache) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """(key scales, value scales, their six strides); without scales tensors that are not touched."""
    if cache.key_scale is None or cache.value_scale is None:
        return cache.key, cache.value, (0,) * 6
    return cache.key_scale, cache.value_scale, (*cache.key_scale.stride(), *cache.value_scale.stride())
