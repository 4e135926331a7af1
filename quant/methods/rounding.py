"""Methods that need no data: every module for itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..canonical import CanonicalWeight
from ..plan import LayerPlan
from ..scheme import Scheme
from .layer_method import LayerWeights, ReadWeight
from .nearest import quantize_nearest
from .statistics import InputStatistics


class RoundedLayers:
    """A `LayerMethod` from a function of weight [N, K] and scheme."""

    def __init__(self, read: ReadWeight, quantize: Callable[[Tensor, Any], CanonicalWeight]) -> None:
        self._read = read
        self._quantize = quantize

    def quantize(self, layer: LayerPlan) -> LayerWeights:
        """Round the layer's modules."""
        weights = {name: self._quantize(self._read(name), scheme) for name, scheme in layer.quantize.items()}
        return LayerWeights(quantized=weights)

    def skip(self, layer: LayerPlan, done: LayerWeights) -> None:
        """Nothing depends on earlier layers."""


class NearestGroups:
    """A `GroupQuantizer` that looks at no data: what a run does whose text is for the KV cache alone."""

    needs_products = False
    needs_originals = False

    def __call__(
        self,
        weights: dict[str, Tensor],
        schemes: dict[str, Scheme],
        statistics: InputStatistics,
        result: LayerWeights,
    ) -> None:
        """Each module for itself."""
        for name, weight in weights.items():
            result.quantized[name] = quantize_nearest(weight, schemes[name])
