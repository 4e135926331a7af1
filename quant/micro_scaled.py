"""MicroScaledWeight: 4- and 8-bit floats with an 8-bit scale per small group along K."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .eight_bit import same_input, spread
from .fp4 import decode_e8m0, decode_fp4
from .scheme import Element, MicroScaled
from .stacking import stack_rows


@dataclass(frozen=True, slots=True, eq=False)
class MicroScaledWeight:
    """MXFP4, MXFP8 or NVFP4.

    ``shape``        (N, K).
    ``codes``        fp4: uint8 [N, ceil(K / 2)], low nibble first; fp8: float8_e4m3fn [N, K].
    ``scales``       [N, G]: uint8 e8m0 exponents, or float8_e4m3fn.
    ``divisor``      float32 [1, 1] or [N, 1], by which the scales are divided (NVFP4), or None.
    ``input_scale``  NVFP4 activations: what the groups' scales are multiplied by before they are rounded to fp8.
    """

    scheme: MicroScaled
    shape: tuple[int, int]
    codes: Tensor
    scales: Tensor
    divisor: Tensor | None = None
    input_scale: Tensor | None = None
    input_zero: Tensor | None = None

    def __post_init__(self) -> None:
        rows, columns = self.shape
        width = -(-columns // 2) if self.scheme.element is Element.FP4 else columns
        assert self.codes.shape == (rows, width), "codes do not fit the shape"
        assert self.scales.shape == (rows, -(-columns // self.scheme.group_size)), "scales do not fit the shape"

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self.codes, self.scales, self.divisor) if t is not None)

    def dequantize(self) -> Tensor:
        """float32 [N, K]."""
        fp4 = self.scheme.element is Element.FP4
        values = decode_fp4(self.codes, self.shape[1]) if fp4 else self.codes.to(torch.float32)
        scales = decode_e8m0(self.scales) if self.scheme.power_of_two else self.scales.to(torch.float32)
        if self.divisor is not None:
            scales = scales / self.divisor
        values *= spread(scales, (1, self.scheme.group_size), self.shape)
        return values


def stack_micro_scaled(parts: list[MicroScaledWeight]) -> MicroScaledWeight | None:
    """One weight stacking ``parts`` along N, each with its own divisor; None where they cannot share a matrix."""
    first = parts[0]
    if not all(_alike(first, part) for part in parts):
        return None
    divisors = [part.divisor.expand(part.shape[0], 1) for part in parts if part.divisor is not None]
    return replace(
        first,
        shape=(sum(part.shape[0] for part in parts), first.shape[1]),
        codes=_cat_bytes([part.codes for part in parts]),
        scales=_cat_bytes([part.scales for part in parts]),
        divisor=torch.cat(divisors) if divisors else None,
    )


def _alike(a: MicroScaledWeight, b: MicroScaledWeight) -> bool:
    if a.scheme != b.scheme or a.shape[1] != b.shape[1] or (a.divisor is None) != (b.divisor is None):
        return False
    return same_input((a.input_scale, a.input_zero), (b.input_scale, b.input_zero))


def _cat_bytes(tensors: list[Tensor]) -> Tensor:
    return stack_rows([tensor.view(torch.uint8) for tensor in tensors]).view(tensors[0].dtype)
