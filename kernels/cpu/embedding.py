"""Rows of a packed embedding in C: one call instead of a chain of torch operations."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ...quant.canonical import PackedWeight
from ...quant.scheme import Offset
from .library import functions
from .panels import FLOAT_TYPES

# As the enumeration of embed.c.
_CENTRED, _ZEROS, _OFFSETS = range(3)

_Sizes = ctypes.c_ssize_t * 7


def embed_packed(ids: Tensor, weight: PackedWeight) -> Tensor:
    """``dequantize`` of the rows ``ids`` int64 [T] -> float32 [T,K]; no act-order."""
    assert weight.perm is None, "an embedding has no order of columns"
    parts = (weight.qweight, weight.scales, weight.zeros)
    assert all(part is None or part.is_contiguous() for part in parts), "a packed embedding is contiguous"
    coding = _CENTRED if weight.zeros is None else _OFFSETS if isinstance(weight.scheme, Offset) else _ZEROS
    columns = weight.shape[1]
    sizes = _Sizes(
        columns,
        weight.qweight.shape[1],
        weight.scheme.bits,
        weight.num_groups,
        weight.group_size,
        FLOAT_TYPES[weight.scales.dtype],
        coding,
    )
    out = torch.empty((ids.numel(), columns))
    functions.twofold_embed(
        ids.data_ptr(),
        ids.numel(),
        sizes,
        weight.qweight.data_ptr(),
        weight.scales.data_ptr(),
        None if weight.zeros is None else weight.zeros.data_ptr(),
        out.data_ptr(),
    )
    return out
