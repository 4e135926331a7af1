"""Weights in panels, filled part by part: what the C linear kernels read.

A panel holds PANEL output features side by side (32 with AVX-512), for each input feature in turn, so one pass streams
the weights once in order. Parts go straight to their places: beside the panels there is only what was just read.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...quant.canonical import (
    CanonicalWeight,
    DenseWeight,
    EightBitWeight,
    MicroScaledWeight,
    PackedWeight,
    dequantize,
    int8_as_packed,
)
from ...quant.fp4 import E2M1, decode_e8m0
from ...quant.packing import num_words, pack, unpack
from ...quant.row_slices import row_chunks
from ...quant.scheme import Element, Fp8, Int8, LowBit, Offset, WeightOnly
from ..problems import LinearProblem
from . import weight_memory
from .library import functions

# pack.c's kinds of source elements.
_WORDS, _BFLOAT16, _FLOAT16, _CODES8, _CODES4 = range(5)
# As ``enum float_type`` in half.h.
FLOAT_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
# Floats that stay in 16 bits, and what linear.h calls them.
HALF_BITS = {torch.bfloat16: 16, torch.float16: 17}
_KINDS = {torch.float32: _WORDS, torch.int32: _WORDS, torch.bfloat16: _BFLOAT16, torch.float16: _FLOAT16}
# int8 to unsigned codes around 128, four at a time.
_RAISE = 0x80808080
# Elements that are expanded at once where C does not read the stored form.
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class DensePanels:
    """``panels`` float32 [ceil(N/PANEL), K, PANEL]."""

    panels: Tensor
    pointer: int
    in_features: int
    out_features: int


@dataclass(frozen=True, slots=True, eq=False)
class LowBitPanels:
    """``codes`` int32 [ceil(N/PANEL), words, PANEL]; [.., G, PANEL]: ``scales`` float32, or as stored in 16 bits;
    ``zeros`` uint8, or offsets as the scales, or None."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    perm: Tensor | None
    group_size: int
    bits: int
    in_features: int
    out_features: int

    @property
    def zero_pointers(self) -> tuple[int | None, int | None]:
        """Addresses of the zeros and of the offsets, None for what there is not."""
        if self.zeros is None:
            return None, None
        address = self.zeros.data_ptr()
        return (address, None) if self.zeros.dtype is torch.uint8 else (None, address)

    @property
    def scale_type(self) -> int:
        """Of scales and offsets, as C numbers it."""
        return FLOAT_TYPES[self.scales.dtype]

    def with_float32_scales(self) -> LowBitPanels:
        """The same weight, its scales and offsets in float32."""
        return replace(self, scales=_in_float32(self.scales), zeros=_in_float32(self.zeros))


class DenseAssembly:
    """A matrix in panels of float32, or of 16-bit floats where all parts have the same, however they are stored."""

    def __init__(self, problem: LinearProblem) -> None:
        self._rows, self._columns = problem.out_features, problem.in_features
        self._dtype, self._panels = torch.float32, torch.empty(0)

    def put(self, first_row: int, part: CanonicalWeight) -> None:
        """Rows ``first_row`` and following become those of ``part``."""
        self._get_ready(part)
        if self._dtype is not torch.float32:
            assert isinstance(part, DenseWeight), "other parts are widened"
            pack_rows(pairs(part.weight), first_row, self._panels)
        elif isinstance(part, DenseWeight):
            pack_rows(_packable(part.weight), first_row, self._panels)
        elif not _put_codes(part, first_row, self._panels):
            for start, chunk in row_chunks(part, _CHUNK):
                pack_rows(dequantize(chunk, torch.float32), first_row + start, self._panels)

    def finish(self) -> DensePanels | LowBitPanels:
        if self._dtype is not torch.float32:
            return of_halves(self._panels, self._dtype, (self._rows, self._columns))
        return DensePanels(self._panels, self._panels.data_ptr(), self._columns, self._rows)

    def _get_ready(self, part: CanonicalWeight) -> None:
        """Panels of the first part's type, or of float32 as soon as parts differ."""
        half = isinstance(part, DenseWeight) and part.weight.dtype in HALF_BITS and self._columns % 2 == 0
        dtype = part.weight.dtype if half and isinstance(part, DenseWeight) else torch.float32
        if self._panels.numel() == 0:
            self._dtype, words = dtype, self._columns if dtype is torch.float32 else self._columns // 2
            self._panels = empty_panels(self._rows, words, torch.float32 if dtype is torch.float32 else torch.int32)
        elif self._dtype not in (dtype, torch.float32):
            wide = empty_panels(self._rows, self._columns, torch.float32)
            wide.copy_(widened(self._panels, self._dtype))
            self._dtype, self._panels = torch.float32, wide


class LowBitAssembly:
    """Integers in 2, 4 or 8 bits, the next of these that holds them: packed ones, or int8 as 8-bit codes around 128."""

    def __init__(self, problem: LinearProblem) -> None:
        scheme, self._columns, self._rows = problem.scheme, problem.in_features, problem.out_features
        assert isinstance(scheme, WeightOnly | LowBit | Offset | Int8), f"{scheme} is not made of integers"
        if isinstance(scheme, Int8):
            self._bits, self._group_size = 8, scheme.resolved_block((self._rows, self._columns))[1]
        else:
            self._bits, self._group_size = stored_bits(scheme.bits), scheme.resolved_group_size(self._columns)
        self._num_groups, self._scheme = -(-self._columns // self._group_size), scheme
        self._codes = empty_panels(self._rows, num_words(self._columns, self._bits), torch.int32)
        self._scales: Tensor = torch.empty(0)
        self._zeros: Tensor | None = None
        self._perm: Tensor | None = None

    def put(self, first_row: int, part: CanonicalWeight) -> None:
        """Rows ``first_row`` and following become those of ``part``."""
        if isinstance(part, EightBitWeight):
            self._put_int8(first_row, part)
            return
        assert isinstance(part, PackedWeight), f"{part.scheme} is not made of packed integers"
        if part.scheme.bits == self._bits:
            pack_rows(part.qweight, first_row, self._codes)
        else:
            for start, chunk in row_chunks(part, _CHUNK):
                assert isinstance(chunk, PackedWeight), "a chunk is of its weight's kind"
                pack_rows(_widened(chunk, self._bits), first_row + start, self._codes)
        self._put_groups(first_row, part.scales, part.zeros)
        self._perm = None if part.perm is None else part.perm.long()

    def finish(self) -> LowBitPanels:
        return LowBitPanels(
            codes=self._codes,
            scales=self._scales,
            zeros=self._zeros,
            perm=self._perm,
            group_size=self._group_size,
            bits=self._bits,
            in_features=self._columns,
            out_features=self._rows,
        )

    def _put_int8(self, first_row: int, part: EightBitWeight) -> None:
        if self._columns % 4:
            for start, chunk in row_chunks(part, _CHUNK):
                assert isinstance(chunk, EightBitWeight), "a chunk is of its weight's kind"
                self.put(first_row + start, int8_as_packed(chunk))
            return
        pack_rows(part.codes.contiguous().view(torch.int32), first_row, self._codes, flip=_RAISE)
        rows = part.scheme.resolved_block(part.shape)[0]
        spread = functools.partial(spread_rows, block_rows=rows, rows=part.shape[0])
        raised = None if part.zeros is None else (spread(part.zeros).to(torch.int16) + 128).to(torch.uint8)
        self._put_groups(first_row, spread(part.scales), raised)

    def _put_groups(self, first_row: int, scales: Tensor, zeros: Tensor | None) -> None:
        """Scales and zeros [rows, G]: the panels keep the first part's type, or float32 as soon as parts differ."""
        scales = _packable(scales)
        if self._scales.numel() == 0:
            self._scales = empty_panels(self._rows, self._num_groups, scales.dtype)
            if not self._scheme.symmetric:
                self._zeros = empty_panels(self._rows, self._num_groups, zero_type(self._scheme, scales.dtype))
        elif self._scales.dtype not in (scales.dtype, torch.float32):
            self._scales = _in_float32(self._scales)
            self._zeros = _in_float32(self._zeros)
        _put_elements(scales, first_row, self._scales)
        if self._zeros is not None:
            assert zeros is not None, "an asymmetric scheme has zeros"
            _put_elements(zeros, first_row, self._zeros)


def widened(panels: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 [.., K, PANEL] of panels [.., K/2, PANEL] with two floats of ``dtype`` in a word."""
    pairs = panels.view(torch.int16).unflatten(2, (-1, 2))
    return pairs.transpose(2, 3).flatten(1, 2).contiguous().view(dtype).float()


def pairs(matrix: Tensor) -> Tensor:
    """16-bit floats [N, K] as int32 [N, K/2]."""
    matrix = matrix.contiguous()
    if matrix.data_ptr() % 4:
        matrix = matrix.clone()
    return matrix.view(torch.int32)


def of_halves(panels: Tensor, dtype: torch.dtype, shape: tuple[int, int]) -> LowBitPanels:
    """Panels of a matrix [N, K] with two floats of ``dtype`` in a word."""
    rows, columns = shape
    none = torch.empty(len(panels), 0, panels.shape[2])
    return LowBitPanels(panels, none, None, None, columns, HALF_BITS[dtype], columns, rows)


def stored_bits(bits: int) -> int:
    """Width of a code of ``bits`` in panels."""
    return next(width for width in (2, 4, 8) if width >= bits)


def _widened(part: PackedWeight, bits: int) -> Tensor:
    """The codes in ``bits``; those of a symmetric scheme move to the middle of the wider range."""
    codes = unpack(part.qweight, part.scheme.bits, part.shape[1])
    if part.scheme.symmetric:
        codes += (1 << (bits - 1)) - (1 << (part.scheme.bits - 1))
    return pack(codes, bits)


def empty_panels(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Panels [ceil(N/PANEL), columns, PANEL] to be filled; only the lanes beyond ``rows`` are zero already."""
    width = int(functions.twofold_panel_width())
    panels = weight_memory.empty((-(-rows // width), columns, width), dtype)
    if rows % width:
        panels[-1].zero_()
    return panels


def pack_rows(
    source: Tensor,
    first_row: int,
    panels: Tensor,
    *,
    kind: int | None = None,
    flip: int = 0,
    table: Tensor | None = None,
    scales: Tensor | None = None,
    block: tuple[int, int] = (1, 1),
) -> None:
    """Copy a matrix into the rows of panels from ``first_row`` on, converting 16-bit floats and codes on the way.

    ``table`` float32 gives the value of each uint8 code, ``scales`` float32 what it is multiplied by, per ``block``.
    """
    kind = _KINDS[source.dtype] if kind is None else kind
    if source.stride(1) != 1 and (kind != _WORDS or source.stride(0) != 1):
        source = source.contiguous()
    sizes = None if scales is None else torch.tensor([*block, scales.shape[1]])
    functions.twofold_pack_rows(
        source.data_ptr(),
        kind,
        source.shape[0],
        panels.shape[1],
        source.stride(0),
        source.stride(1),
        flip,
        None if table is None else table.data_ptr(),
        None if scales is None else scales.data_ptr(),
        None if sizes is None else sizes.data_ptr(),
        first_row,
        panels.data_ptr(),
    )


def _packable(matrix: Tensor) -> Tensor:
    """The matrix itself where C reads its type, else in float32."""
    return matrix if matrix.dtype in _KINDS else matrix.to(torch.float32)


def _put_codes(part: CanonicalWeight, first_row: int, panels: Tensor) -> bool:
    """Expand fp8 and fp4 codes in C; False for weights that are stored in another way."""
    if isinstance(part, EightBitWeight) and isinstance(part.scheme, Fp8) and part.zeros is None:
        codes, scales, block = part.codes, part.scales.to(torch.float32), part.scheme.resolved_block(part.shape)
        kind, table = _CODES8, _fp8_values(codes.dtype)
    elif isinstance(part, MicroScaledWeight):
        fp4 = part.scheme.element is Element.FP4
        scales = decode_e8m0(part.scales) if part.scheme.power_of_two else part.scales.to(torch.float32)
        scales = scales if part.divisor is None else scales / part.divisor
        codes, block = part.codes, (1, part.scheme.group_size)
        kind, table = (_CODES4, _fp4_values()) if fp4 else (_CODES8, _fp8_values(codes.dtype))
    else:
        return False
    codes = codes.contiguous().view(torch.uint8)
    pack_rows(codes, first_row, panels, kind=kind, table=table, scales=scales.contiguous(), block=block)
    return True


@functools.cache
def _fp8_values(dtype: torch.dtype) -> Tensor:
    return torch.arange(256, dtype=torch.uint8).view(dtype).to(torch.float32)


@functools.cache
def _fp4_values() -> Tensor:
    return torch.tensor((*E2M1, *(-value for value in E2M1)))


def zero_type(scheme: WeightOnly | LowBit | Offset | Int8, scales: torch.dtype) -> torch.dtype:
    """How panels keep the zeros of an asymmetric scheme."""
    return scales if isinstance(scheme, Offset) else torch.uint8


def _put_elements(values: Tensor, first_row: int, panels: Tensor) -> None:
    """Scales or zeros [N, G] into their rows, in the panels' type."""
    if panels.dtype is torch.float32:
        pack_rows(_packable(values), first_row, panels)
        return
    assert values.dtype is panels.dtype, "only float32 panels take other types"
    functions.twofold_pack_groups(
        values.data_ptr(), values.itemsize, *values.shape, *values.stride(), first_row, panels.data_ptr()
    )


def _in_float32(panels: Tensor | None) -> Any:
    """Floats in float32; zeros that are codes, and None, as they are."""
    if panels is None or panels.dtype in (torch.float32, torch.uint8):
        return panels
    wide = weight_memory.empty(tuple(panels.shape), torch.float32)
    return wide.copy_(panels)


def spread_rows(values: Tensor, *, block_rows: int, rows: int) -> Tensor:
    """One value per block of rows to one per row."""
    return values.repeat_interleave(block_rows, dim=0)[:rows].contiguous()
