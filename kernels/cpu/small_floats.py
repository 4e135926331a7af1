"""Linear layers in C with weights of small floats, fp8 or fp4, which stay in their bits.

Results equal those of the dequantized matrix bit for bit, with the input rounded as the scheme says (``rounding``).
"""

from __future__ import annotations

import ctypes
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ...platforms.spec import DeviceSpec
from ...quant.canonical import CanonicalWeight, EightBitWeight, MicroScaledWeight, PackedWeight
from ...quant.fp4 import decode_e8m0
from ...quant.packing import num_words
from ...quant.scheme import Element, Fp8, MicroScaled, WeightOnly
from ..problems import LinearProblem
from . import rounding
from .library import functions, unavailable_for
from .linear import assemble, padded_rows
from .panels import LowBitAssembly, LowBitPanels, spread_rows
from .rounding import RoundedPanels

# What linear.h calls panels of these floats, by the bits of one.
FLOAT_BITS = {8: 18, 4: 19}


class SmallFloatAssembly:
    """Panels of fp8 or fp4 codes; all parts have the same static input scale."""

    def __init__(self, problem: LinearProblem) -> None:
        columns = problem.in_features
        group_size = scale_group(problem)
        self._codes_scheme = WeightOnly(_bits(problem.scheme), -1 if group_size >= columns else group_size)
        self._panels = LowBitAssembly(replace(problem, scheme=self._codes_scheme))
        self._input = rounding.InputOfParts()

    def put(self, first_row: int, part: CanonicalWeight) -> None:
        """Rows ``first_row`` and following become those of ``part``."""
        self._input.note(part)
        scales = _row_scales(part)
        assert isinstance(part, EightBitWeight | MicroScaledWeight), f"{part.scheme} is not made of small floats"
        self._panels.put(first_row, PackedWeight(self._codes_scheme, part.shape, _words(part.codes), scales))

    def finish(self) -> LowBitPanels | RoundedPanels:
        panels = self._panels.finish()
        if panels.bits == 8:
            panels = _split(panels)
        return self._input.with_panels(replace(panels, bits=FLOAT_BITS[panels.bits]))


def prepare(weight: CanonicalWeight, dtype: torch.dtype) -> LowBitPanels | RoundedPanels:
    """Lay codes and scales of small floats out in panels."""
    panels: LowBitPanels | RoundedPanels = assemble(SmallFloatAssembly, weight, dtype)
    return panels


def num_bytes(problem: LinearProblem, stored: int) -> int:
    """Memory of the panels: codes in their bits, a scale per output feature and group of input features."""
    scheme, shape = problem.scheme, (problem.out_features, problem.in_features)
    groups = -(-problem.in_features // scale_group(problem))
    if isinstance(scheme, MicroScaled):
        scale_bytes = 2 if scheme.power_of_two else 4
    else:
        blocks = scheme.num_blocks(shape)
        scale_bytes = 2 if stored - shape[0] * shape[1] < 3 * blocks[0] * blocks[1] else 4
    return padded_rows(shape[0]) * (4 * num_words(shape[1], _bits(scheme)) + groups * scale_bytes)


def why_not(spec: DeviceSpec, problem: LinearProblem) -> str | None:
    """Why these products are not for a problem, in words."""
    scheme = problem.scheme
    if not isinstance(scheme, Fp8 | MicroScaled):
        return f"the weight is {scheme}, not made of small floats"
    if scheme.activation is not None and (reason := rounding.why_not(scheme.activation)):
        return reason
    return unavailable_for(problem.dtype)


def _bits(scheme: Fp8 | MicroScaled) -> int:
    return 4 if isinstance(scheme, MicroScaled) and scheme.element is Element.FP4 else 8


def scale_group(problem: LinearProblem) -> int:
    """Input features that share a scale."""
    scheme = problem.scheme
    if isinstance(scheme, MicroScaled):
        return scheme.group_size
    assert isinstance(scheme, Fp8), f"{scheme} is not made of small floats"
    return scheme.resolved_block((problem.out_features, problem.in_features))[1]


def _words(codes: Tensor) -> Tensor:
    """Bytes of codes [N, ...] as int32, those of a row padded with zeros."""
    codes = codes.contiguous().view(torch.uint8)
    if codes.shape[1] % 4:
        codes = F.pad(codes, (0, -codes.shape[1] % 4))
    if codes.data_ptr() % 4:
        codes = codes.clone()
    return codes.view(torch.int32)


def _row_scales(part: CanonicalWeight) -> Tensor:
    """[N, G], in 16 bits where these hold them."""
    if isinstance(part, MicroScaledWeight):
        if part.scheme.power_of_two:
            return decode_e8m0(part.scales).to(torch.bfloat16)
        scales = part.scales.to(torch.float32)
        return scales if part.divisor is None else scales / part.divisor
    assert isinstance(part, EightBitWeight) and part.zeros is None, f"{part.scheme} is not made of small floats"
    return spread_rows(part.scales, block_rows=part.scheme.resolved_block(part.shape)[0], rows=part.shape[0])


def _split(panels: LowBitPanels) -> LowBitPanels:
    """Words of four codes as lines of bytes. A group with a code that is no number gets the scale NaN."""
    found = ctypes.c_int32(0)
    blocks = panels.codes.shape[0] * panels.codes.shape[1]
    functions.twofold_split_words(panels.codes.data_ptr(), blocks, ctypes.addressof(found))
    if not found.value:
        return panels
    count, words, width = panels.codes.shape
    lines = (panels.codes.view(torch.uint8).view(count, 4 * words, width) & 0x7F) == 0x7F
    for group in range(panels.scales.shape[1]):
        lost = lines[:, group * panels.group_size : (group + 1) * panels.group_size].any(1)
        panels.scales[:, group].masked_fill_(lost, float("nan"))
    return panels
