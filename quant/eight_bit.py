"""EightBitWeight: int8 and fp8 weights, kept in 8 bits with one scale per block."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .packing import pack
from .scheme import Fp8, Int8, WeightOnly
from .stacking import stack_rows


@dataclass(frozen=True, slots=True, eq=False)
class EightBitWeight:
    """``W[n, k] = (code[n, k] - zero) * scale``, with scale and zero of the block that (n, k) lies in.

    ``codes``        int8 or float8_e4m3fn [N, K].
    ``scales``       [ceil(N / rows), ceil(K / columns)] for blocks of (rows, columns), any floating-point type.
    ``zeros``        int8 like ``scales``; None: all 0.
    ``input_scale``  float32 scalar for static activations, else None; ``input_zero`` likewise when they have a zero.
    """

    scheme: Int8 | Fp8
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    input_scale: Tensor | None = None
    input_zero: Tensor | None = None

    def __post_init__(self) -> None:
        assert self.scales.shape == self.scheme.num_blocks(self.shape), "scales do not fit the blocks"
        assert self.zeros is None or self.zeros.shape == self.scales.shape, "zeros do not fit the blocks"

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self.codes, self.scales, self.zeros) if t is not None)

    def dequantize(self) -> Tensor:
        """float32 [N, K]."""
        block = self.scheme.resolved_block(self.shape)
        values = self.codes.to(torch.float32)
        if self.zeros is not None:
            values -= spread(self.zeros.to(torch.float32), block, self.shape)
        values *= spread(self.scales.to(torch.float32), block, self.shape)
        return values


def spread(values: Tensor, block: tuple[int, int], shape: tuple[int, int]) -> Tensor:
    """One value per block to [N, K], or to what broadcasts to it where one block covers a whole side."""
    for side in (0, 1):
        if values.shape[side] > 1 and block[side] > 1:
            values = values.repeat_interleave(block[side], dim=side).narrow(side, 0, shape[side])
    return values


def stack_eight_bit(parts: list[EightBitWeight]) -> EightBitWeight | None:
    """One weight stacking ``parts`` along N, every part with its own scales; None where they cannot share a matrix.

    Scales per tensor become scales per channel unless they are all the same. Blocks of rows that do not divide a part
    become smaller ones: each part keeps the grid that starts at its own first row.
    """
    first = parts[0]
    if not all(_alike(first, part) for part in parts):
        return None
    rows = _common_rows(parts)
    scales = [with_row_blocks(part, part.scales, rows) for part in parts]
    zeros = [with_row_blocks(part, part.zeros, rows) for part in parts if part.zeros is not None]
    return replace(
        first,
        scheme=replace(first.scheme, block=(rows, first.scheme.block[1])),
        codes=stack_rows([part.codes.view(torch.uint8) for part in parts]).view(first.codes.dtype),
        scales=scales[0] if rows == -1 else torch.cat(scales),
        zeros=None if not zeros else (zeros[0] if rows == -1 else torch.cat(zeros)),
    )


def same_input(a: tuple[Tensor | None, ...], b: tuple[Tensor | None, ...]) -> bool:
    """Whether two weights' static input parameters are equal."""
    return all((x is None and y is None) or _equal(x, y) for x, y in zip(a, b, strict=True))


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    return a is not None and b is not None and torch.equal(a, b)


def _alike(a: EightBitWeight, b: EightBitWeight) -> bool:
    if replace(a.scheme, block=b.scheme.block) != b.scheme or a.scheme.block[1] != b.scheme.block[1]:
        return False
    if a.shape[1] != b.shape[1] or a.scales.dtype != b.scales.dtype or (a.zeros is None) != (b.zeros is None):
        return False
    return same_input((a.input_scale, a.input_zero), (b.input_scale, b.input_zero))


def _common_rows(parts: list[EightBitWeight]) -> int:
    """Rows of a block in the stacked matrix; -1: one scale for all."""
    if all(part.scheme.block[0] == -1 for part in parts):
        first = parts[0]
        same = all(same_input((part.scales, part.zeros), (first.scales, first.zeros)) for part in parts)
        return -1 if same else 1
    sizes = [part.scheme.resolved_block(part.shape)[0] for part in parts]
    return math.gcd(*sizes, *(part.shape[0] for part in parts[:-1]))


def with_row_blocks(part: EightBitWeight, values: Tensor, rows: int) -> Tensor:
    """The same values for blocks of ``rows`` rows, which divides the part's own."""
    if rows == -1:
        return values
    repeats = part.scheme.resolved_block(part.shape)[0] // rows
    return values.repeat_interleave(repeats, dim=0)[: -(-part.shape[0] // rows)]


def int8_as_packed_fields(
    codes: Tensor, scales: Tensor, zeros: Tensor | None, block: tuple[int, int]
) -> tuple[WeightOnly, Tensor, Tensor, Tensor | None]:
    """Signed int8 [N, K] as the unsigned 8-bit stream: (scheme, qweight, scales [N, G], zeros [N, G] or None)."""
    shape = (codes.shape[0], codes.shape[1])
    rows, columns = (shape[i] if block[i] == -1 else block[i] for i in (0, 1))

    def per_row(values: Tensor) -> Tensor:
        return values.repeat_interleave(rows, dim=0)[: shape[0]].contiguous()

    group_size = -1 if columns >= shape[1] else columns
    raised = None if zeros is None else (per_row(zeros).to(torch.int16) + 128).to(torch.uint8)
    qweight = pack((codes.to(torch.int16) + 128).to(torch.uint8), 8)
    return WeightOnly(8, group_size, symmetric=raised is None), qweight, per_row(scales), raised
