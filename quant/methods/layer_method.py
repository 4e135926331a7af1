"""What the pipeline asks of a method: one decoder layer at a time, in order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from ..canonical import CanonicalWeight
from ..plan import LayerPlan


@dataclass(slots=True)
class LayerWeights:
    """The outcome of one layer, by full names: quantized modules, and dense tensors that were changed.

    ``output_errors`` are relative errors of the modules' outputs on calibration data, ``weight_errors`` those of the
    weights where a method changed them before it rounded them. ``notes`` are sentences about single modules that a
    user must know. ``kv_scales``: float32 [2], of keys and of values, by attention module.
    """

    quantized: dict[str, CanonicalWeight] = field(default_factory=dict)
    changed: dict[str, Tensor] = field(default_factory=dict)
    output_errors: dict[str, float] = field(default_factory=dict)
    weight_errors: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    kv_scales: dict[str, Tensor] = field(default_factory=dict)


# A module's ``.weight``, in float32 and checked to be finite.
ReadWeight = Callable[[str], Tensor]


class LayerMethod(Protocol):
    """Quantizes decoder layers in their order; ``skip`` stands for one whose result is there already."""

    def quantize(self, layer: LayerPlan) -> LayerWeights: ...

    def skip(self, layer: LayerPlan, done: LayerWeights) -> None: ...
