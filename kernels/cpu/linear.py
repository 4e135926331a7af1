"""Linear layers in C, float32 sums: dense and packed 2-, 4- and 8-bit weights in one panel layout.

A panel holds PANEL output features side by side (32 with AVX-512), for each input feature in turn, so one pass streams
the weights once in order. Low-bit results equal those of the dequantized matrix bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ...quant.canonical import CanonicalWeight, DenseWeight, PackedWeight, dequantize
from ...quant.packing import num_words
from ...quant.scheme import Int8
from ..problems import LinearProblem
from . import weight_memory
from .library import functions


@dataclass(frozen=True, slots=True, eq=False)
class DensePanels:
    """``panels`` float32 [ceil(N/PANEL), K, PANEL]."""

    panels: Tensor
    pointer: int
    in_features: int
    out_features: int


@dataclass(frozen=True, slots=True, eq=False)
class LowBitPanels:
    """``codes`` int32 [ceil(N/PANEL), words, PANEL], ``scales`` float32 and ``zeros`` uint8 or None [.., G, PANEL]."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    perm: Tensor | None
    group_size: int
    bits: int
    in_features: int
    out_features: int


def prepare_dense(weight: CanonicalWeight, dtype: torch.dtype) -> DensePanels:
    """Pack a weight into panels of float32, dequantizing it first where it is packed."""
    matrix = weight.weight if isinstance(weight, DenseWeight) else dequantize(weight, torch.float32)
    panels = _pack(matrix.to(torch.float32))
    return DensePanels(panels, panels.data_ptr(), matrix.shape[1], matrix.shape[0])


def run_dense(x: Tensor, weight: DensePanels, bias: Tensor | None = None) -> Tensor:
    """x [T,K] float32 -> [T,N]."""
    x, rows = _rows(x, bias, weight.in_features)
    y = torch.empty((rows, weight.out_features))
    functions.twofold_linear_dense(
        x.data_ptr(),
        x.stride(0),
        rows,
        weight.in_features,
        weight.out_features,
        weight.pointer,
        None if bias is None else bias.data_ptr(),
        y.data_ptr(),
        weight.out_features,
    )
    return y


def prepare_low_bit(weight: PackedWeight, dtype: torch.dtype) -> LowBitPanels:
    """Lay codes, scales and zeros out in panels."""
    zeros = None
    if weight.zeros is not None:
        width = functions.twofold_panel_width()
        padded = F.pad(weight.zeros.to(torch.uint8), (0, 0, 0, -weight.shape[0] % width))
        panels = padded.view(-1, width, weight.num_groups).transpose(1, 2)
        zeros = weight_memory.empty(tuple(panels.shape), torch.uint8).copy_(panels)
    return LowBitPanels(
        codes=_pack(weight.qweight),
        scales=_pack(weight.scales.to(torch.float32)),
        zeros=zeros,
        perm=None if weight.perm is None else weight.perm.long(),
        group_size=weight.group_size,
        bits=weight.scheme.bits,
        in_features=weight.shape[1],
        out_features=weight.shape[0],
    )


def run_low_bit(x: Tensor, weight: LowBitPanels, bias: Tensor | None = None) -> Tensor:
    """x [T,K] float32 -> [T,N]."""
    if weight.perm is not None:
        x = x.index_select(1, weight.perm)
    x, rows = _rows(x, bias, weight.in_features)
    y = torch.empty((rows, weight.out_features))
    functions.twofold_linear_low_bit(
        x.data_ptr(),
        x.stride(0),
        rows,
        weight.in_features,
        weight.out_features,
        weight.codes.data_ptr(),
        weight.scales.data_ptr(),
        None if weight.zeros is None else weight.zeros.data_ptr(),
        weight.codes.shape[1],
        weight.scales.shape[1],
        weight.group_size,
        weight.bits,
        None if bias is None else bias.data_ptr(),
        y.data_ptr(),
        weight.out_features,
    )
    return y


def dense_bytes(problem: LinearProblem, stored: int) -> int:
    """Memory of ``DensePanels``."""
    return 4 * _padded_rows(problem.out_features) * problem.in_features


def low_bit_bytes(problem: LinearProblem, stored: int) -> int:
    """Memory of ``LowBitPanels``, of packed integers or of int8 ones with a scale per row and group."""
    scheme, columns = problem.scheme, problem.in_features
    if isinstance(scheme, Int8):
        groups, bits, act_order = scheme.num_blocks((1, columns))[1], 8, False
    else:
        groups, bits, act_order = scheme.num_groups(columns), scheme.bits, scheme.act_order
    per_row = 4 * num_words(columns, bits) + groups * (4 if scheme.symmetric else 5)
    return _padded_rows(problem.out_features) * per_row + (8 * columns if act_order else 0)


def _padded_rows(rows: int) -> int:
    width = int(functions.twofold_panel_width())
    return -(-rows // width) * width


def _pack(matrix: Tensor) -> Tensor:
    """[N, C] of 32-bit elements -> [ceil(N/PANEL), C, PANEL], padded with zeros."""
    matrix = matrix.contiguous()
    width = functions.twofold_panel_width()
    rows, columns = matrix.shape
    panels = weight_memory.empty((-(-rows // width), columns, width), matrix.dtype)
    functions.twofold_pack_panels(matrix.data_ptr(), rows, columns, columns, panels.data_ptr())
    return panels


def _rows(x: Tensor, bias: Tensor | None, in_features: int) -> tuple[Tensor, int]:
    """x with contiguous rows, and how many they are."""
    rows, columns = x.shape
    assert columns == in_features and x.dtype is torch.float32, "x must be float32 [T,K]"
    if not x.is_contiguous() and x.stride(1) != 1:
        x = x.contiguous()
    assert bias is None or (bias.dtype is torch.float32 and bias.is_contiguous()), "bias must be float32 [N]"
    return x, rows
