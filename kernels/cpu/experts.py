"""Products with experts in C: all experts of a layer in one call, whatever the linear kernels' panels hold."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...quant.canonical import CanonicalWeight
from . import linear_bf16, linear_int8, step_memory
from .library import functions
from .linear import workspace
from .linear_bf16 import Bf16Panels
from .linear_int8 import Int8Panels
from .panels import DensePanels, LowBitPanels
from .rounding import RoundedPanels, sizes_of

# What experts.c calls an expert's tensors.
_NUM_TENSORS = 5
_NUM_SIZES = 12


@dataclass(frozen=True, slots=True, eq=False)
class InputRounding:
    """How inputs are rounded, with the stored scale and zero of each expert [E]."""

    how: ctypes.Array[ctypes.c_ssize_t]
    scales: ctypes.Array[ctypes.c_float]
    zeros: ctypes.Array[ctypes.c_float]


@dataclass(frozen=True, slots=True, eq=False)
class Int8Inputs:
    """Inputs in 8 bits: ``sizes`` as of ``Int8Panels``, the stored scale of each expert [E] or 0, and ``row_bytes``."""

    sizes: ctypes.Array[ctypes.c_ssize_t]
    scales: ctypes.Array[ctypes.c_float]
    row_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Bf16Inputs:
    """Inputs and weights in bfloat16: ``sizes`` and ``row_bytes`` as of ``Bf16Panels``."""

    sizes: ctypes.Array[ctypes.c_ssize_t]
    row_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class ExpertPanels:
    """``weights`` keeps the panels alive that ``tensors`` points to, [E] of (floats or codes, scales, zeros, offsets,
    perm)."""

    weights: list[Any]
    tensors: ctypes.Array[ctypes.c_void_p]
    in_features: int
    out_features: int
    words: int = 0
    groups: int = 0
    group_size: int = 0
    bits: int = 0
    scale_type: int = 0
    rounding: InputRounding | None = None
    int8: Int8Inputs | None = None
    bf16: Bf16Inputs | None = None


Prepared = DensePanels | LowBitPanels | RoundedPanels | Int8Panels | Bf16Panels


def prepare(
    prepare_one: Callable[[CanonicalWeight, torch.dtype], Prepared],
    weights: Sequence[CanonicalWeight],
    dtype: torch.dtype,
) -> ExpertPanels:
    """The experts' weights in panels, each prepared by ``prepare_one`` of a linear candidate."""
    parts = [prepare_one(weight, dtype) for weight in weights]
    assert len({type(part) for part in parts}) == 1, "experts' inputs are rounded alike"
    panels = of_panels([part if isinstance(part, DensePanels | LowBitPanels) else part.panels for part in parts])
    if rounded := [part for part in parts if isinstance(part, RoundedPanels)]:
        return replace(panels, rounding=_rounding(rounded))
    if int8 := [part for part in parts if isinstance(part, Int8Panels)]:
        return replace(panels, int8=_int8_inputs(int8, panels.scale_type))
    if bf16 := [part for part in parts if isinstance(part, Bf16Panels)]:
        sizes = linear_bf16.sizes_with(bf16[0].sizes, panels.scale_type)
        return replace(panels, bf16=Bf16Inputs(sizes, bf16[0].row_bytes))
    return panels


def _rounding(parts: Sequence[RoundedPanels]) -> InputRounding:
    scales = (ctypes.c_float * len(parts))(*(part.scale for part in parts))
    zeros = (ctypes.c_float * len(parts))(*(part.zero for part in parts))
    return InputRounding(sizes_of(parts[0].activation), scales, zeros)


def _int8_inputs(parts: Sequence[Int8Panels], scale_type: int) -> Int8Inputs:
    first = parts[0]
    scales = (ctypes.c_float * len(parts))(*(part.input_scale for part in parts))
    return Int8Inputs(linear_int8.sizes_with(first.sizes, scale_type), scales, first.row_bytes)


def of_panels(panels: Sequence[DensePanels | LowBitPanels]) -> ExpertPanels:
    """Panels of equal shapes and types, one per expert."""
    assert len({(type(each), getattr(each, "bits", 0)) for each in panels}) == 1, "experts' panels differ in type"
    panels = _of_one_scale_type(panels)
    pointers = [pointer for each in panels for pointer in _pointers(each)]
    tensors = (ctypes.c_void_p * len(pointers))(*pointers)
    first = panels[0]
    common = (list(panels), tensors, first.in_features, first.out_features)
    if isinstance(first, DensePanels):
        return ExpertPanels(*common)
    words, groups = first.codes.shape[1], first.scales.shape[1]
    return ExpertPanels(*common, words, groups, first.group_size, first.bits, first.scale_type)


def _of_one_scale_type(panels: Sequence[DensePanels | LowBitPanels]) -> Sequence[DensePanels | LowBitPanels]:
    if len({each.scale_type for each in panels if isinstance(each, LowBitPanels)}) < 2:
        return panels
    return [each.with_float32_scales() if isinstance(each, LowBitPanels) else each for each in panels]


def _pointers(panels: DensePanels | LowBitPanels) -> tuple[int | None, ...]:
    if isinstance(panels, DensePanels):
        return panels.pointer, None, None, None, None
    perm = panels.perm
    return (
        panels.codes.data_ptr(),
        panels.scales.data_ptr(),
        *panels.zero_pointers,
        None if perm is None else perm.data_ptr(),
    )


def expert_linear(
    x: Tensor, experts: ExpertPanels, expert_ids: Tensor, routing_weights: Tensor | None = None
) -> Tensor:
    """``reference.expert_linear``: x [T,K] or [T,k,K] float32 -> [T,k,N], or with ``routing_weights`` [T,N]."""
    tokens, top_k = expert_ids.shape
    rows = x.reshape(-1, x.shape[-1])
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    assert rows.dtype is torch.float32 and rows.shape[1] == experts.in_features, "x must be float32 [T,K] or [T,k,K]"
    ids = expert_ids.to(torch.int32).contiguous()
    routing = None if routing_weights is None else routing_weights.float().contiguous()
    choices, width = tokens * top_k, experts.out_features
    out = step_memory.empty((tokens, top_k, width) if routing is None else (tokens, width))
    inputs, products = step_memory.empty((choices, experts.in_features)), step_memory.empty((choices, width))
    sizes = (ctypes.c_ssize_t * _NUM_SIZES)(
        tokens,
        top_k,
        len(experts.tensors) // _NUM_TENSORS,
        experts.in_features,
        width,
        rows.stride(0),
        1 if x.dim() == 3 else top_k,
        experts.words,
        experts.groups,
        experts.group_size,
        experts.bits,
        experts.scale_type,
    )
    rounded = experts.int8 or experts.bf16
    buffer = workspace(choices, 0 if rounded is None else rounded.row_bytes)
    failed = functions.twofold_expert_linear(
        sizes,
        experts.tensors,
        *_inputs(experts, buffer),
        rows.data_ptr(),
        ids.data_ptr(),
        inputs.data_ptr(),
        products.data_ptr(),
        None if routing is None else routing.data_ptr(),
        out.data_ptr(),
    )
    if failed:
        raise MemoryError(f"no memory to sort {choices} choices of experts")
    return out


def _inputs(experts: ExpertPanels, buffer: Tensor) -> tuple[Any, ...]:
    """What C is told about inputs: how they are rounded, scales, zeros, sizes for 8 or 16 bits, and a workspace."""
    if (int8 := experts.int8) is not None:
        return None, int8.scales, None, int8.sizes, None, buffer.data_ptr()
    if (bf16 := experts.bf16) is not None:
        return None, None, None, None, bf16.sizes, buffer.data_ptr()
    if (rounding := experts.rounding) is not None:
        return rounding.how, rounding.scales, rounding.zeros, None, None, None
    return None, None, None, None, None, None
