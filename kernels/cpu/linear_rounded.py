"""Linear layers in C with weights of integers whose scheme rounds the input in another way than ``linear_int8`` does:
to fp8, or to int8 with a zero point. Products are summed in float32 over the rounded values."""

from __future__ import annotations

import torch
from torch import Tensor

from ...platforms.spec import DeviceSpec
from ...quant.canonical import CanonicalWeight
from ...quant.scheme import Int8, LowBit
from ..problems import LinearProblem
from . import linear, rounding
from .library import unavailable_for
from .linear import assemble
from .panels import LowBitAssembly, LowBitPanels, stored_bits
from .rounding import RoundedPanels


class RoundedAssembly:
    """Panels of integers; all parts have the same static input scale."""

    def __init__(self, problem: LinearProblem) -> None:
        self._panels, self._input = LowBitAssembly(problem), rounding.InputOfParts()

    def put(self, first_row: int, part: CanonicalWeight) -> None:
        """Rows ``first_row`` and following become those of ``part``."""
        self._input.note(part)
        self._panels.put(first_row, part)

    def finish(self) -> LowBitPanels | RoundedPanels:
        return self._input.with_panels(self._panels.finish())


def prepare(weight: CanonicalWeight, dtype: torch.dtype) -> LowBitPanels | RoundedPanels:
    """Lay a weight of integers out in panels."""
    panels: LowBitPanels | RoundedPanels = assemble(RoundedAssembly, weight, dtype)
    return panels


def run(x: Tensor, weight: LowBitPanels | RoundedPanels, bias: Tensor | None = None) -> Tensor:
    """x [T,K] float32 -> [T,N]; also for weights of ``small_floats``."""
    if isinstance(weight, RoundedPanels):
        return linear.run(weight.rounded(x), weight.panels, bias)
    return linear.run(x, weight, bias)


def run_gated(
    x: Tensor, weight: LowBitPanels | RoundedPanels, bias: Tensor | None = None, activation: str = "silu"
) -> Tensor:
    """What ``GATES`` says of ``run``, [T,N/2]."""
    if isinstance(weight, RoundedPanels):
        return linear.run_gated(weight.rounded(x), weight.panels, bias, activation)
    return linear.run_gated(x, weight, bias, activation)


def why_not(spec: DeviceSpec, problem: LinearProblem) -> str | None:
    """Why these products are not for a problem, in words."""
    scheme = problem.scheme
    if not isinstance(scheme, Int8 | LowBit):
        return f"the scheme is {scheme}, not weights of integers with rounded inputs"
    if reason := rounding.why_not(scheme.activation):
        return reason
    if isinstance(scheme, LowBit) and scheme.act_order and scheme.activation.group_size > 0:
        return "inputs are rounded in groups, and act-order would mix these"
    bits = 8 if isinstance(scheme, Int8) else scheme.bits
    if not 2 <= bits <= 8:
        return f"it decodes 2 to 8 bits, not {bits}"
    group = scheme.block[1] if isinstance(scheme, Int8) else scheme.group_size
    per_word = 32 // stored_bits(bits)
    if group != -1 and group % per_word and group < problem.in_features:
        return f"groups of {group} do not end on a word of {per_word} codes"
    return unavailable_for(problem.dtype)
