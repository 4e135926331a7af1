"""Rows of an embedding in C, in one call: of a packed one, or of a head's panels where the head is the embedding."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...quant.canonical import PackedWeight
from ...quant.scheme import Dense, Offset, WeightOnly
from ..problems import LinearProblem
from . import step_memory
from .library import functions
from .linear_bf16 import Bf16Panels
from .linear_int8 import Int8Panels
from .panels import FLOAT_TYPES, HALF_BITS, DensePanels, LowBitPanels

# As the enumerations of embed.c and embed_panels.c.
_CENTRED, _ZEROS, _OFFSETS = range(3)
_WORDS32, _PAIRS, _CODES, _IN_NIBBLES, _IN_BYTES, _IN_RAISED_BYTES, _IN_STEPS = range(7)

_Sizes = ctypes.c_ssize_t * 7
_PanelSizes = ctypes.c_ssize_t * 8

LookUp = Callable[[Tensor, Any], Tensor]


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
    out = step_memory.empty((ids.numel(), columns))
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


def look_up(problem: LinearProblem, stored: torch.dtype) -> LookUp | None:
    """What gives rows of a prepared weight as its stored matrix has them; ``stored``: a dense one's type."""
    scheme = problem.scheme
    if isinstance(scheme, Dense):
        return embed_panels
    plain = isinstance(scheme, Offset) or (isinstance(scheme, WeightOnly) and not scheme.act_order)
    return embed_panels if plain else None


def look_up_bf16(problem: LinearProblem, stored: torch.dtype) -> LookUp | None:
    """The same of ``linear_bf16``'s weights: other floats than bfloat16 are rounded there."""
    if isinstance(problem.scheme, Dense) and stored is not torch.bfloat16:
        return None
    return look_up(problem, stored)


def embed_panels(ids: Tensor, weight: DensePanels | LowBitPanels | Int8Panels | Bf16Panels) -> Tensor:
    """Rows ``ids`` int64 [T] of a matrix that a linear kernel keeps -> float32 [T,K], as ``dequantize`` gives them."""
    panels = weight.panels if isinstance(weight, Int8Panels | Bf16Panels) else weight
    columns = panels.in_features
    out = step_memory.empty((ids.numel(), columns))
    parts: tuple[int, int | None, int | None]
    if isinstance(panels, DensePanels):
        sizes = _PanelSizes(columns, columns, 32, 0, columns, FLOAT_TYPES[torch.float32], _CENTRED, _WORDS32)
        parts = (panels.pointer, None, None)
    else:
        assert panels.perm is None, "an embedding has no order of columns"
        sizes = _low_bit_sizes(panels, weight if isinstance(weight, Bf16Panels) else None)
        zeros = panels.zeros
        parts = (panels.codes.data_ptr(), panels.scales.data_ptr(), None if zeros is None else zeros.data_ptr())
    functions.twofold_embed_panels(ids.data_ptr(), ids.numel(), sizes, *parts, out.data_ptr())
    return out


def _low_bit_sizes(panels: LowBitPanels, steps: Bf16Panels | None) -> ctypes.Array[ctypes.c_ssize_t]:
    floats = {bits: dtype for dtype, bits in HALF_BITS.items()}.get(panels.bits)
    coding = _CENTRED
    if panels.zeros is not None:
        coding = _ZEROS if panels.zeros.dtype is torch.uint8 else _OFFSETS
    if steps is None:
        words, layout = panels.codes.shape[1], _CODES if floats is None else _PAIRS
    else:
        words, layout = steps.steps.shape[1] * steps.steps.shape[2], _IN_STEPS
        if floats is None:
            raised = _IN_BYTES if coding == _OFFSETS else _IN_RAISED_BYTES
            layout = raised if panels.bits == 8 else _IN_NIBBLES
    return _PanelSizes(
        panels.in_features,
        words,
        panels.bits,
        panels.scales.shape[1],
        panels.group_size,
        panels.scale_type if floats is None else FLOAT_TYPES[floats],
        coding,
        layout,
    )
