"""Linear layers in C, float32 sums: dense and packed 2- to 8-bit weights in one panel layout (``panels``).

Low-bit results equal those of the dequantized matrix bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...quant.canonical import CanonicalWeight
from ...quant.footprint import StoredLinear
from ...quant.packing import num_words
from ...quant.scheme import Dense, Int8, LowBit, Offset, WeightOnly
from ..problems import LinearProblem
from . import step_memory
from .elementwise import gelu_and_mul, silu_and_mul
from .library import functions
from .panels import DenseAssembly, DensePanels, LowBitAssembly, LowBitPanels, stored_bits, zero_type

# Rows of a workspace come in multiples of so many: CAPACITY in linear_int8.c, two tiles' rows in linear_bf16.c.
_ROWS = 32
# The activations that gated products have, by Hugging Face's names; as ``enum gate`` in linear.h.
GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu_and_mul,
    "gelu_pytorch_tanh": partial(gelu_and_mul, approximate="tanh"),
}
NO_GATE = 0
# Up to so many rows a product's result is small.
_FEW_ROWS = 64


def prepare_dense(weight: CanonicalWeight, dtype: torch.dtype) -> DensePanels | LowBitPanels:
    """Pack a weight into panels of its 16-bit floats, or of float32; a quantized one is dequantized on the way."""
    return assemble(DenseAssembly, weight, dtype)


def prepare_low_bit(weight: CanonicalWeight, dtype: torch.dtype) -> LowBitPanels:
    """Lay codes, scales and zeros of a packed or an int8 weight out in panels."""
    return assemble(LowBitAssembly, weight, dtype)


def assemble(kind: Callable[[LinearProblem], Any], weight: CanonicalWeight, dtype: torch.dtype) -> Any:
    """What an assembly of ``kind`` makes of one whole weight, for a product in ``dtype``."""
    rows, columns = weight.shape
    problem = LinearProblem(scheme=weight.scheme, in_features=columns, out_features=rows, dtype=dtype)
    assembly = kind(problem)
    assembly.put(0, weight)
    return assembly.finish()


def run(x: Tensor, weight: DensePanels | LowBitPanels, bias: Tensor | None = None) -> Tensor:
    """x [T,K] float32 -> [T,N]."""
    return _run(x, weight, bias, NO_GATE)


def run_gated(
    x: Tensor, weight: DensePanels | LowBitPanels, bias: Tensor | None = None, activation: str = "silu"
) -> Tensor:
    """What ``GATES`` says of ``run``, [T,N/2].

    Of many rows without the whole product in memory, which would be most of what a prompt's step takes there.
    """
    if not is_gated_at_once(len(x), weight.out_features):
        return GATES[activation](run(x, weight, bias))
    return _run(x, weight, bias, gate_number(activation))


def _run(x: Tensor, weight: DensePanels | LowBitPanels, bias: Tensor | None, gate: int) -> Tensor:
    if isinstance(weight, LowBitPanels) and weight.perm is not None:
        x = x.index_select(1, weight.perm)
    x, rows = checked_rows(x, bias, weight.in_features)
    features = weight.out_features // 2 if gate else weight.out_features
    y = step_memory.empty((rows, features))
    sizes = x.data_ptr(), x.stride(0), rows, weight.in_features, weight.out_features
    into = None if bias is None else bias.data_ptr(), y.data_ptr(), features, gate
    if isinstance(weight, DensePanels):
        functions.twofold_linear_dense(*sizes, weight.pointer, *into)
        return y
    functions.twofold_linear_low_bit(
        *sizes,
        weight.codes.data_ptr(),
        weight.scales.data_ptr(),
        *weight.zero_pointers,
        weight.scale_type,
        weight.codes.shape[1],
        weight.scales.shape[1],
        weight.group_size,
        weight.bits,
        *into,
    )
    return y


def gated(function: Callable[..., Tensor]) -> Mapping[str, Callable[..., Tensor]]:
    """``function``, one of those called ``run_gated``, for each of ``GATES``."""
    return {activation: partial(function, activation=activation) for activation in GATES}


def gate_number(activation: str) -> int:
    """What C calls one of ``GATES``."""
    return list(GATES).index(activation) + 1


def is_gated_at_once(rows: int, out_features: int) -> bool:
    """Whether so many rows are worth a gated product of their own, and gates and ups come in separate panels."""
    return rows > _FEW_ROWS and out_features % (2 * int(functions.twofold_panel_width())) == 0


def dense_bytes(problem: LinearProblem, stored: int) -> int:
    """Memory of ``DenseAssembly``'s panels: 16-bit floats stay so."""
    half = isinstance(problem.scheme, Dense) and problem.in_features % 2 == 0
    half = half and stored == 2 * problem.out_features * problem.in_features
    return (2 if half else 4) * padded_rows(problem.out_features) * problem.in_features


def low_bit_bytes(problem: LinearProblem, stored: int) -> int:
    """Memory of ``LowBitPanels``, packed integers or int8 ones with a scale per row and group; scales as stored."""
    scheme, columns = problem.scheme, problem.in_features
    if isinstance(scheme, Int8):
        groups, bits, act_order = scheme.num_blocks((1, columns))[1], 8, False
    else:
        groups, bits, act_order = scheme.num_groups(columns), stored_bits(scheme.bits), scheme.act_order
    scales = _scale_dtype(scheme, (problem.out_features, columns), stored)
    zero_bytes = 0 if scheme.symmetric else zero_type(scheme, scales).itemsize
    per_row = 4 * num_words(columns, bits) + groups * (scales.itemsize + zero_bytes)
    return padded_rows(problem.out_features) * per_row + (8 * columns if act_order else 0)


def _scale_dtype(scheme: WeightOnly | Offset | LowBit | Int8, shape: tuple[int, int], stored: int) -> torch.dtype:
    """A type as wide as the scales of a canonical weight that takes ``stored`` bytes."""
    short, wide = (StoredLinear(scheme, shape, size).nbytes for size in (2, 4))
    return torch.float16 if stored < (short + wide) / 2 else torch.float32


def padded_rows(rows: int) -> int:
    """Rows of the panels that hold so many."""
    width = int(functions.twofold_panel_width())
    return -(-rows // width) * width


def workspace(rows: int, row_bytes: int) -> Tensor:
    """What a product with rounded inputs of so many rows writes these to."""
    return step_memory.empty((-(-rows // _ROWS) * _ROWS * row_bytes,), torch.uint8)


def checked_rows(x: Tensor, bias: Tensor | None, in_features: int) -> tuple[Tensor, int]:
    """x with contiguous rows, and how many they are."""
    rows, columns = x.shape
    assert columns == in_features and x.dtype is torch.float32, "x must be float32 [T,K]"
    if not x.is_contiguous() and x.stride(1) != 1:
        x = x.contiguous()
    assert bias is None or (bias.dtype is torch.float32 and bias.is_contiguous()), "bias must be float32 [N]"
    return x, rows
