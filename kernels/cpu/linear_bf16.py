"""Linear layers in C with inputs and weights in bfloat16, sums in float32, in AMX's tile registers.

A weight is what the exact kernels compute of its codes, rounded once to bfloat16; so is the input. Codes stay in their
bits: 4 and 8, and those of 2 bits in 4.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ...platforms.spec import DeviceSpec
from ...quant.canonical import CanonicalWeight, DenseWeight, dequantize
from ...quant.row_slices import row_chunks
from ...quant.scheme import Dense, Fp8, Int8, LowBit, MicroScaled, Offset, WeightOnly
from ..problems import LinearProblem
from . import small_floats, step_memory, weight_memory
from .bf16_rows import FEW_ROWS, STEP_K, empty_rows, row_stride
from .elementwise import silu_and_mul
from .library import functions, unavailable, unavailable_for
from .linear import assemble, checked_rows, low_bit_bytes, padded_rows, workspace
from .panels import HALF_BITS, LowBitAssembly, LowBitPanels, empty_panels, of_halves, pack_rows, pairs, stored_bits

# Gates and ups come in panels of their own (PANEL in simd.h, on processors with tiles).
_GATED_FEATURES = 32
# As in linear_bf16.h: how codes of a step lie and become weights.
_NIBBLES, _BYTES, _FLOATS8, _FLOATS16 = range(4)
_CENTRED, _ZERO, _OFFSET, _E2M1 = range(4)
# What linear.h calls panels of these floats.
_BFLOAT16_BITS = HALF_BITS[torch.bfloat16]
_E4M3_BITS, _E2M1_BITS = small_floats.FLOAT_BITS[8], small_floats.FLOAT_BITS[4]
_STEP_BITS = {_NIBBLES: 4, _BYTES: 8, _FLOATS8: 8, _FLOATS16: 16}
# Groups end on multiples of so many features.
_GROUP_K = 16
# Unsigned codes around 128 to signed ones, four at a time.
_LOWER = 0x80808080
# Elements of a dense weight that are rounded at once.
_CHUNK = 1 << 20
_NUM_SIZES, _NUM_TENSORS = 10, 5

Sizes = ctypes.c_ssize_t * _NUM_SIZES
Tensors = ctypes.c_void_p * _NUM_TENSORS


@dataclass(frozen=True, slots=True, eq=False)
class Bf16Panels:
    """``steps`` uint8 [ceil(N/PANEL), K/STEP_K, bytes], in the order of linear_bf16.h, also the codes of ``panels``.

    ``sizes`` and ``tensors`` are what C is told; ``row_bytes``: of workspace for a row of the input.
    """

    steps: Tensor
    panels: LowBitPanels
    sizes: ctypes.Array[ctypes.c_ssize_t]
    tensors: ctypes.Array[ctypes.c_void_p]

    @property
    def row_bytes(self) -> int:
        return row_stride(self.panels.in_features) * 2


class Bf16Assembly:
    """A weight of any scheme that ``why_not`` lets pass, filled part by part."""

    def __init__(self, problem: LinearProblem) -> None:
        self._problem = problem
        self._parts: _RoundedAssembly | small_floats.SmallFloatAssembly | LowBitAssembly
        if isinstance(problem.scheme, Dense):
            self._parts = _RoundedAssembly(problem)
        elif isinstance(problem.scheme, Fp8 | MicroScaled):
            self._parts = small_floats.SmallFloatAssembly(problem)
        else:
            self._parts = LowBitAssembly(problem)

    def put(self, first_row: int, part: CanonicalWeight) -> None:
        """Rows ``first_row`` and following become those of ``part``."""
        self._parts.put(first_row, part)

    def finish(self) -> Bf16Panels:
        panels = self._parts.finish()
        assert isinstance(panels, LowBitPanels), "inputs are rounded to bfloat16 alone"
        return _in_steps(panels)


class _RoundedAssembly:
    """A dense matrix in panels of bfloat16, with columns of zeros up to a whole step."""

    def __init__(self, problem: LinearProblem) -> None:
        self._rows, self._columns = problem.out_features, problem.in_features
        self._padding = -problem.in_features % STEP_K
        self._panels = empty_panels(self._rows, (self._columns + self._padding) // 2, torch.int32)

    def put(self, first_row: int, part: CanonicalWeight) -> None:
        for start, chunk in row_chunks(part, _CHUNK):
            matrix = chunk.weight if isinstance(chunk, DenseWeight) else dequantize(chunk, torch.float32)
            matrix = F.pad(matrix.to(torch.bfloat16), (0, self._padding))
            pack_rows(pairs(matrix), first_row + start, self._panels)

    def finish(self) -> LowBitPanels:
        return of_halves(self._panels, torch.bfloat16, (self._rows, self._columns))


def prepare(weight: CanonicalWeight, dtype: torch.dtype) -> Bf16Panels:
    """Lay a weight out in steps of tiles."""
    panels: Bf16Panels = assemble(Bf16Assembly, weight, dtype)
    return panels


def run(x: Tensor, weight: Bf16Panels, bias: Tensor | None = None) -> Tensor:
    """x [T,K] float32, or in bfloat16 as ``bf16_rows`` has it -> [T,N]."""
    if x.dtype is torch.bfloat16:
        return _run_rounded(x, weight, bias)
    x, rows = checked_rows(x, bias, weight.panels.in_features)
    y = step_memory.empty((rows, weight.panels.out_features))
    few = rows <= FEW_ROWS
    buffer = workspace(rows, weight.row_bytes) if few else empty_rows(rows, weight.panels.in_features)
    functions.twofold_linear_bf16(
        x.data_ptr(),
        x.stride(0),
        rows,
        weight.tensors,
        weight.sizes,
        buffer.data_ptr(),
        None if bias is None else bias.data_ptr(),
        y.data_ptr(),
    )
    return y


def _run_rounded(x: Tensor, weight: Bf16Panels, bias: Tensor | None) -> Tensor:
    rows = x.shape[0]
    if rows <= FEW_ROWS:
        return run(x.float(), weight, bias)
    _check_rounded(x, weight)
    y = step_memory.empty((rows, weight.panels.out_features))
    functions.twofold_linear_bf16_rounded(
        x.data_ptr(),
        x.stride(0),
        rows,
        weight.tensors,
        weight.sizes,
        None if bias is None else bias.data_ptr(),
        y.data_ptr(),
    )
    return y


def run_gated(x: Tensor, weight: Bf16Panels, bias: Tensor | None = None) -> Tensor:
    """``silu_and_mul`` of what ``run`` gives, [T,N/2], as the next product reads it best: many rows in bfloat16."""
    inner = weight.panels.out_features // 2
    if x.dtype is not torch.bfloat16 or x.shape[0] <= FEW_ROWS or inner % _GATED_FEATURES:
        return silu_and_mul(run(x, weight, bias))
    _check_rounded(x, weight)
    out = empty_rows(x.shape[0], inner)
    functions.twofold_gated_bf16(
        x.data_ptr(),
        x.stride(0),
        x.shape[0],
        weight.tensors,
        weight.sizes,
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        out.stride(0),
    )
    return out


def input_dtype(weight: Bf16Panels) -> torch.dtype | None:
    """What inputs may come rounded to: no order of features may be left to find in them."""
    return torch.bfloat16 if weight.panels.perm is None else None


def _check_rounded(x: Tensor, weight: Bf16Panels) -> None:
    columns = weight.panels.in_features
    assert x.shape[1] == columns and weight.panels.perm is None, "rounded x must be [T,K] in the weight's order"
    assert x.stride(1) == 1 and x.stride(0) >= -(-columns // STEP_K) * STEP_K, "rounded x must have whole steps"


def sizes_with(sizes: ctypes.Array[ctypes.c_ssize_t], scale_type: int) -> ctypes.Array[ctypes.c_ssize_t]:
    """The sizes of panels whose scales are of another type."""
    return Sizes(*sizes[:-1], scale_type)


def num_bytes(problem: LinearProblem, stored: int) -> int:
    """Memory of the steps and of what belongs to groups."""
    scheme, whole = problem.scheme, replace(problem, in_features=-(-problem.in_features // STEP_K) * STEP_K)
    if isinstance(scheme, Dense):
        return 2 * padded_rows(problem.out_features) * whole.in_features
    if isinstance(scheme, Fp8 | MicroScaled):
        return small_floats.num_bytes(problem, stored)
    packed = low_bit_bytes(problem, stored)
    bits = 8 if isinstance(scheme, Int8) else stored_bits(scheme.bits)
    codes = padded_rows(problem.out_features) * problem.in_features * bits // 8
    return packed + (codes if bits == 2 else 0)


def missing() -> str | None:
    """Why this processor has no such products, in words; None where it has."""
    if reason := unavailable():
        return reason
    if not functions.twofold_bf16_tiles():
        return "the processor, the compiler or the system has no AMX tiles of bfloat16"
    return None


def why_not(spec: DeviceSpec, problem: LinearProblem) -> str | None:
    """Why products in bfloat16 are not for a problem, in words."""
    scheme = problem.scheme
    if isinstance(scheme, LowBit | Int8) or getattr(scheme, "activation", None) is not None:
        return f"the checkpoint says how inputs are rounded: {scheme}"
    if reason := _group_reason(problem):
        return reason
    return unavailable_for(problem.dtype) or missing()


def _group_reason(problem: LinearProblem) -> str | None:
    scheme = problem.scheme
    if isinstance(scheme, Dense):
        return None
    if isinstance(scheme, WeightOnly | Offset):
        if not 2 <= scheme.bits <= 8:
            return f"it decodes 2 to 8 bits, not {scheme.bits}"
        group_size = scheme.resolved_group_size(problem.in_features)
    elif isinstance(scheme, Fp8 | MicroScaled):
        group_size = small_floats.scale_group(problem)
    else:
        return f"the weight is {scheme}, neither dense nor made of integers or small floats"
    if group_size % _GROUP_K and group_size < problem.in_features:
        return f"groups of {group_size} do not end on a multiple of {_GROUP_K} features"
    return None


def _in_steps(panels: LowBitPanels) -> Bf16Panels:
    """Panels of ``linear`` in the order of tiles, in the same memory where that has as many bytes."""
    kind, coding = _form(panels)
    num_panels, words, width = panels.codes.shape
    steps = -(-panels.in_features // STEP_K)
    step_bytes = width * STEP_K * _STEP_BITS[kind] // 8
    same = words * width * 4 == steps * step_bytes
    out = panels.codes if same else weight_memory.empty((num_panels, steps, step_bytes), torch.uint8)
    flip = _LOWER if kind == _BYTES and coding != _OFFSET else 0
    functions.twofold_pack_bf16_steps(
        panels.codes.data_ptr(), num_panels, words, panels.bits, flip, steps, step_bytes, out.data_ptr()
    )
    out = out.view(torch.uint8).view(num_panels, steps, step_bytes)
    sizes = Sizes(
        panels.in_features,
        panels.out_features,
        steps,
        step_bytes,
        panels.scales.shape[1],
        panels.group_size,
        kind,
        coding,
        1 << (panels.bits - 1) if kind == _NIBBLES and panels.bits in (2, 4) else 0,
        panels.scale_type,
    )
    perm = None if panels.perm is None else panels.perm.data_ptr()
    tensors = Tensors(out.data_ptr(), panels.scales.data_ptr(), *panels.zero_pointers, perm)
    return Bf16Panels(out, replace(panels, codes=out), sizes, tensors)


def _form(panels: LowBitPanels) -> tuple[int, int]:
    """How the codes of panels will lie, and how they become weights."""
    if panels.bits == _BFLOAT16_BITS:
        return _FLOATS16, _CENTRED
    if panels.bits in (_E4M3_BITS, _E2M1_BITS):
        return (_FLOATS8, _CENTRED) if panels.bits == _E4M3_BITS else (_NIBBLES, _E2M1)
    zeros, offsets = panels.zero_pointers
    coding = _OFFSET if offsets is not None else _ZERO if zeros is not None else _CENTRED
    return (_BYTES if panels.bits == 8 else _NIBBLES), coding
