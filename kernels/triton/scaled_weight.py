"""An 8-bit weight as the scaled matmul reads it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ...quant.canonical import CanonicalWeight, EightBitWeight, MicroScaledWeight
from ...quant.eight_bit import spread
from ...quant.fnuz import weight_to_fnuz
from ...quant.fp4 import decode_e8m0
from ...quant.scheme import Element, Fp8, Int8, MicroScaled, Scheme
from ..problems import LinearProblem
from ..quantized_input import InputFormat

# What e4m3's bits mean as those of a float16 (``decode_e4m3``), as a share of what they stand for.
BITS_FACTOR = 256.0


@dataclass(frozen=True, slots=True, eq=False)
class ScaledWeight:
    """A weight [N,K] and how its input is quantized (``input``; None: not at all).

    ``codes``   int8, e4m3fn or e4m3fnuz [N,K]; uint8 where the kernel decodes e4m3fn's bits itself.
    ``scales``  float32 [GK,GN]: of ``group`` input features and ``rows`` output features each.
    ``zeros``   int32 like ``scales``, or None: all 0.
    ``sums``    int32 [K / common,N], for inputs with zero points: of ``code - zero`` over each ``common`` features that
                share their scales on both sides.
    ``per_tensor``  all of ``scales`` are the same.
    """

    shape: tuple[int, int]
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    sums: Tensor | None
    rows: int
    group: int
    common: int
    input: InputFormat | None
    per_tensor: bool = False

    @property
    def is_grouped(self) -> bool:
        """Whether scales change along K."""
        return self.common < self.shape[1]

    @property
    def is_corrected(self) -> bool:
        """Whether zero points are subtracted group by group."""
        return self.is_grouped and (self.zeros is not None or self.sums is not None)


def eight_bit_scheme(scheme: Scheme) -> Int8 | Fp8 | None:
    """The scheme in 8-bit codes with scales per block, MXFP8 included; None: it is another one."""
    if isinstance(scheme, MicroScaled) and scheme.element is Element.FP8 and scheme.power_of_two:
        return Fp8((1, scheme.group_size), scheme.activation)
    return scheme if isinstance(scheme, Int8 | Fp8) else None


def _eight_bit(weight: CanonicalWeight) -> EightBitWeight:
    scheme = eight_bit_scheme(weight.scheme)
    if isinstance(weight, MicroScaledWeight) and scheme is not None:
        return EightBitWeight(scheme, weight.codes, decode_e8m0(weight.scales))
    assert isinstance(weight, EightBitWeight), f"{weight.scheme} is not made of 8-bit codes; can_run refuses it"
    return weight


def prepare_native(weight: CanonicalWeight, dtype: torch.dtype) -> ScaledWeight:
    """For products of codes: int8, or fp8 where the chip's 8-bit floats are e4m3fn. No code is copied."""
    weight = _eight_bit(weight)
    assert weight.scheme.activation is not None, f"{weight.scheme} does not quantize its input; can_run refuses it"
    return _prepare(weight, weight.codes, weight.codes.dtype)


def prepare_fnuz(weight: CanonicalWeight, dtype: torch.dtype) -> ScaledWeight:
    """For products of codes on e4m3fnuz chips: fp8 codes and scales are converted, to the same values."""
    weight = _eight_bit(weight)
    return prepare_native(weight_to_fnuz(weight) if isinstance(weight.scheme, Fp8) else weight, dtype)


def prepare_wide(weight: CanonicalWeight, dtype: torch.dtype) -> ScaledWeight:
    """For fp8 codes that the kernel turns into floats of ``dtype``, as which inputs keep their codes, too."""
    weight = _eight_bit(weight)
    assert isinstance(weight.scheme, Fp8), f"{weight.scheme} is not fp8; can_run refuses it"
    return _prepare(weight, weight.codes.view(torch.uint8), dtype)


def input_format(prepared: ScaledWeight) -> InputFormat | None:
    """How a prepared weight's input is quantized."""
    return prepared.input


def prepared_bytes(problem: LinearProblem, stored: int) -> int:
    """Of a ``ScaledWeight``: codes, float32 scales, int32 zeros and sums."""
    scheme, shape = eight_bit_scheme(problem.scheme), (problem.out_features, problem.in_features)
    assert scheme is not None, f"{problem.scheme} is not made of 8-bit codes; can_run refuses it"
    numbers = math.prod(_grid(scheme, shape)) * (1 if isinstance(scheme, Fp8) or scheme.symmetric else 2)
    if scheme.activation is not None and not scheme.activation.symmetric:
        numbers += -(-shape[1] // _common(scheme, shape)) * shape[0]
    return math.prod(shape) + 4 * numbers


def _grid(scheme: Int8 | Fp8, shape: tuple[int, int]) -> tuple[int, int]:
    rows, columns = scheme.num_blocks(shape)
    return (shape[0], 1) if columns == 1 else (rows, columns)


def _common(scheme: Int8 | Fp8, shape: tuple[int, int]) -> int:
    """Input features that share their scales in the weight and in the input."""
    size = scheme.resolved_block(shape)[1] if scheme.num_blocks(shape)[1] > 1 else 0
    return math.gcd(size, max(0, scheme.activation.group_size if scheme.activation else 0)) or shape[1]


def _prepare(weight: EightBitWeight, codes: Tensor, codes_dtype: torch.dtype) -> ScaledWeight:
    scheme, shape = weight.scheme, weight.shape
    rows, group = scheme.resolved_block(shape)
    if scheme.num_blocks(shape)[1] == 1:
        rows, group = 1, shape[1]
    factor = BITS_FACTOR if codes.dtype is torch.uint8 else 1.0
    common = _common(scheme, shape)
    how = scheme.activation
    return ScaledWeight(
        shape=shape,
        codes=codes.contiguous(),
        scales=_transposed(weight, weight.scales.float() * factor),
        zeros=None if weight.zeros is None else _transposed(weight, weight.zeros.to(torch.int32)),
        sums=None if how is None or how.symmetric else _sums(weight, common),
        rows=rows,
        group=group,
        common=common,
        input=None if how is None else _input(weight, codes_dtype),
        per_tensor=scheme.block == (-1, -1),
    )


def _input(weight: EightBitWeight, codes_dtype: torch.dtype) -> InputFormat:
    assert weight.scheme.activation is not None
    scale, zero = (None if v is None else v.float().contiguous() for v in (weight.input_scale, weight.input_zero))
    return InputFormat(weight.scheme.activation, codes_dtype, scale, zero)


def _transposed(weight: EightBitWeight, values: Tensor) -> Tensor:
    """[GK,GN]; one group of input features has a value for each output feature."""
    if values.shape[1] == 1:
        values = spread(values, weight.scheme.resolved_block(weight.shape), (weight.shape[0], 1))
        values = values.expand(weight.shape[0], 1)
    return values.t().contiguous()


def _sums(weight: EightBitWeight, common: int) -> Tensor:
    codes = weight.codes.to(torch.int32)
    if weight.zeros is not None:
        block = weight.scheme.resolved_block(weight.shape)
        codes = codes - spread(weight.zeros.to(torch.int32), block, weight.shape)
    parts = [part.sum(1, dtype=torch.int32) for part in codes.split(common, dim=1)]
    return torch.stack(parts)
