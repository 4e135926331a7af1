"""The input of a product rounded in C as its scheme says: ``reference.fake_quantize``, row by row."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from ...quant.canonical import CanonicalWeight, DenseWeight
from ...quant.scheme import Activation, Element, activation_of
from . import step_memory
from .library import functions
from .panels import LowBitPanels

# As ``element`` in round_rows.c.
_ELEMENTS = {Element.INT8: 0, Element.FP8: 1, Element.FP4: 2}
# C rounds so many features at a time, of one group.
_STEP = 16

Sizes = ctypes.c_ssize_t * 5


def sizes_of(how: Activation) -> ctypes.Array[ctypes.c_ssize_t]:
    """What C is told about a rounding; the stored scale of NVFP4 goes into the groups' own."""
    dynamic = how.dynamic or (how.element is Element.FP4)
    return Sizes(_ELEMENTS[how.element], max(how.group_size, 0), dynamic, not how.symmetric, how.power_of_two)


@dataclass(frozen=True, slots=True, eq=False)
class RoundedPanels:
    """Panels and how the input of their product is rounded; ``scale`` and ``zero`` of static activations, else 0.0."""

    panels: LowBitPanels
    activation: Activation
    scale: float = 0.0
    zero: float = 0.0

    def rounded(self, x: Tensor) -> Tensor:
        """``fake_quantize`` of x [T,K] float32."""
        return round_rows(x, self.activation, self.scale, self.zero)


class InputOfParts:
    """How the input of a weight that is assembled is rounded: all its parts say the same."""

    def __init__(self) -> None:
        self._activation: Activation | None = None
        self._scale = self._zero = 0.0

    def note(self, part: CanonicalWeight) -> None:
        """What ``part`` says."""
        self._activation = activation_of(part.scheme)
        if self._activation is not None and not isinstance(part, DenseWeight):
            self._scale, self._zero = _number(part.input_scale), _number(part.input_zero)

    def with_panels(self, panels: LowBitPanels) -> LowBitPanels | RoundedPanels:
        """The assembled panels, with the rounding if there is any."""
        if self._activation is None:
            return panels
        return RoundedPanels(panels, self._activation, self._scale, self._zero)


def round_rows(x: Tensor, how: Activation, scale: float = 0.0, zero: float = 0.0) -> Tensor:
    """``fake_quantize`` of x [T,K] float32, whose rows may lie apart."""
    assert x.dtype is torch.float32, "x must be float32 [T,K]"
    if x.stride(1) != 1:
        x = x.contiguous()
    out = step_memory.empty(x.shape)
    functions.twofold_round_rows(x.data_ptr(), x.stride(0), *x.shape, sizes_of(how), scale, zero, out.data_ptr())
    return out


def _number(value: Tensor | None) -> float:
    return 0.0 if value is None else float(value)


def why_not(how: Activation) -> str | None:
    """Why C does not round so, in words."""
    if how.group_size == 0 and how.dynamic:
        return f"it rounds row by row; {how} shares a scale among all rows"
    if how.group_size > 0 and how.group_size % _STEP:
        return f"it rounds groups of {_STEP} features or a multiple, not of {how.group_size}"
    return None
