"""Linear layers in C with the input in 8 bits: products of integers, summed exactly, on ``linear``'s panels.

The input's scales are those of ``reference.fake_quantize``: per token or static where the checkpoint says so, else per
32 features. With two planes what the codes leave over is rounded once more, in the same way, where the square of a
scale is over twice the mean of its token's: there the input has 16 bits.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ...platforms.spec import DeviceSpec
from ...quant.canonical import CanonicalWeight, DenseWeight
from ...quant.scheme import Activation, Element, Int8, LowBit, Offset, WeightOnly
from ..problems import LinearProblem
from . import step_memory
from .library import functions, unavailable_for
from .linear import GATES, NO_GATE, assemble, checked_rows, gate_number, is_gated_at_once, workspace
from .panels import LowBitAssembly, LowBitPanels

# How inputs are rounded that a checkpoint leaves as they are.
INPUT = Activation(Element.INT8, 32)
# With more features under one scale a sum might pass 32 bits.
_MAX_BLOCK = 1 << 16
_NUM_SIZES, _NUM_TENSORS = 10, 5
# As STRIDE in linear_int8.c.
_STRIDE = 64

_Sizes = ctypes.c_ssize_t * _NUM_SIZES
_Tensors = ctypes.c_void_p * _NUM_TENSORS


@dataclass(frozen=True, slots=True, eq=False)
class Int8Panels:
    """Panels and what C is told about them; ``input_scale`` 0.0: scales come from the values.

    ``row_bytes``: of workspace for a row of the input with its ``planes``.
    """

    panels: LowBitPanels
    sizes: ctypes.Array[ctypes.c_ssize_t]
    tensors: ctypes.Array[ctypes.c_void_p]
    input_scale: float
    row_bytes: int


class Int8Assembly:
    """A weight in panels for inputs in ``planes`` of 8 bits; all its parts have the same static input scale."""

    def __init__(self, problem: LinearProblem, planes: int = 1) -> None:
        self._problem, self._assembly, self._planes = problem, LowBitAssembly(problem), planes
        self._input_scale = 0.0

    def put(self, first_row: int, part: CanonicalWeight) -> None:
        """Rows ``first_row`` and following become those of ``part``."""
        scale = None if isinstance(part, DenseWeight) or not _rounds(part.scheme) else part.input_scale
        self._input_scale = 0.0 if scale is None else float(scale)
        self._assembly.put(first_row, part)

    def finish(self) -> Int8Panels:
        panels = self._assembly.finish()
        block = block_size(self._problem)
        how, columns = input_of(self._problem.scheme), panels.in_features
        sizes = _Sizes(
            columns,
            panels.out_features,
            panels.codes.shape[1],
            panels.scales.shape[1],
            panels.group_size,
            panels.bits,
            max(how.group_size, 0),
            block,
            panels.scale_type,
            self._planes,
        )
        perm = None if panels.perm is None else panels.perm.data_ptr()
        tensors = _Tensors(panels.codes.data_ptr(), panels.scales.data_ptr(), *panels.zero_pointers, perm)
        blocks = -(-columns // block)
        row_bytes = self._planes * (-(-columns // _STRIDE) * _STRIDE + 8 * blocks)
        if self._planes == 2:
            row_bytes += 4 * (blocks + 1)  # lists; one is for 16 rows and more
        return Int8Panels(panels, sizes, tensors, self._input_scale, row_bytes)


def prepare(weight: CanonicalWeight, dtype: torch.dtype) -> Int8Panels:
    """Lay a weight of integers out in panels."""
    panels: Int8Panels = assemble(Int8Assembly, weight, dtype)
    return panels


def prepare_two_planes(weight: CanonicalWeight, dtype: torch.dtype) -> Int8Panels:
    """The same panels, for inputs in two planes."""
    panels: Int8Panels = assemble(two_planes, weight, dtype)
    return panels


def two_planes(problem: LinearProblem) -> Int8Assembly:
    """An assembly for inputs in two planes."""
    return Int8Assembly(problem, planes=2)


def run(x: Tensor, weight: Int8Panels, bias: Tensor | None = None) -> Tensor:
    """x [T,K] float32 -> [T,N]."""
    return _run(x, weight, bias, NO_GATE)


def run_gated(x: Tensor, weight: Int8Panels, bias: Tensor | None = None, activation: str = "silu") -> Tensor:
    """What ``GATES`` says of ``run``, [T,N/2]; of many rows without the whole product in memory."""
    if not is_gated_at_once(len(x), weight.panels.out_features):
        return GATES[activation](run(x, weight, bias))
    return _run(x, weight, bias, gate_number(activation))


def _run(x: Tensor, weight: Int8Panels, bias: Tensor | None, gate: int) -> Tensor:
    x, rows = checked_rows(x, bias, weight.panels.in_features)
    y = step_memory.empty((rows, weight.panels.out_features // 2 if gate else weight.panels.out_features))
    buffer = workspace(rows, weight.row_bytes)
    functions.twofold_linear_int8(
        x.data_ptr(),
        x.stride(0),
        rows,
        weight.tensors,
        weight.sizes,
        weight.input_scale,
        buffer.data_ptr(),
        None if bias is None else bias.data_ptr(),
        y.data_ptr(),
        gate,
    )
    return y


def sizes_with(sizes: ctypes.Array[ctypes.c_ssize_t], scale_type: int) -> ctypes.Array[ctypes.c_ssize_t]:
    """The sizes of panels whose scales are of another type."""
    return _Sizes(*sizes[:-2], scale_type, sizes[-1])


def input_of(scheme: object) -> Activation:
    """How the input of a weight is rounded here."""
    return scheme.activation if isinstance(scheme, Int8 | LowBit) else INPUT


def block_size(problem: LinearProblem) -> int:
    """Features in which neither the input's scale nor the weight's changes."""
    group, columns = _group_size(problem), problem.in_features
    rounded = input_of(problem.scheme).group_size
    sizes = [size for size in (group, rounded) if 0 < size < columns]
    return math.gcd(*sizes) if sizes else columns


def why_not(spec: DeviceSpec, problem: LinearProblem) -> str | None:
    """Why products of integers are not for a problem, in words."""
    scheme = problem.scheme
    if not isinstance(scheme, WeightOnly | Offset | LowBit | Int8):
        return f"the weight is {scheme}, not made of integers"
    bits = 8 if isinstance(scheme, Int8) else scheme.bits
    if not 2 <= bits <= 8:
        return f"it decodes 2 to 8 bits, not {bits}"
    how = input_of(scheme)
    if how.element is not Element.INT8 or not how.symmetric or (how.group_size == 0 and how.dynamic):
        return f"it rounds inputs to int8 around 0, per token, per group or with a stored scale, not as {how}"
    block = block_size(problem)
    if block < problem.in_features and block % 16:
        return f"scales change every {block} features; it sums 16 or a multiple"
    if block > _MAX_BLOCK:
        return f"a sum over {block} features may pass 32 bits; it takes up to {_MAX_BLOCK}"
    return unavailable_for(problem.dtype)


def why_not_two_planes(spec: DeviceSpec, problem: LinearProblem) -> str | None:
    """Why an input does not get a second plane, in words."""
    if not problem.is_sensitive:
        return "only inputs of sensitive layers get more than 8 bits"
    if not isinstance(problem.scheme, WeightOnly | Offset):
        return f"the weight is {problem.scheme}, not weight-only integers"
    return why_not(spec, problem)


def _group_size(problem: LinearProblem) -> int:
    scheme = problem.scheme
    if isinstance(scheme, Int8):
        return scheme.resolved_block((problem.out_features, problem.in_features))[1]
    assert isinstance(scheme, WeightOnly | Offset | LowBit), f"{scheme} is not made of integers"
    return scheme.resolved_group_size(problem.in_features)


def _rounds(scheme: object) -> bool:
    return isinstance(scheme, Int8 | LowBit)
