"""What the C kernels are told about a layer's cache: pointers of its scales and sizes in the order of kernels.h."""

from __future__ import annotations

import torch

from ..kv_layout import KVCache

# As ``enum element`` in codes.h.
_ELEMENTS = {torch.float32: 0, torch.int8: 1, torch.float8_e4m3fn: 2, torch.bfloat16: 3}
KV_DTYPES = tuple(_ELEMENTS)
NUM_SIZES = 16


def cache_sizes(cache: KVCache) -> tuple[int, ...]:
    """Kind of element, whether scales are given, strides of key, value and both scales (0 where there are none)."""
    assert cache.key.dtype is cache.value.dtype, "the C kernels want one dtype for keys and values"
    key_scale, value_scale = cache.key_scale, cache.value_scale
    return (
        _ELEMENTS[cache.key.dtype],
        int(cache.static_scales),
        *cache.key.stride(),
        *cache.value.stride(),
        *(key_scale.stride() if key_scale is not None else (0, 0, 0)),
        *(value_scale.stride() if value_scale is not None else (0, 0, 0)),
    )


def cache_pointers(cache: KVCache) -> tuple[int, int, int | None, int | None]:
    """Addresses of key, value, key scale and value scale, the last two None for floats."""
    key_scale, value_scale = cache.key_scale, cache.value_scale
    return (
        cache.key.data_ptr(),
        cache.value.data_ptr(),
        None if key_scale is None else key_scale.data_ptr(),
        None if value_scale is None else value_scale.data_ptr(),
    )
