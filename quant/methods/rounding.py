"""Methods that need no data: every module for itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..canonical import CanonicalWeight
from ..plan import LayerPlan
from ..scheme import Scheme
from .input_powers import relative
from .layer_method import LayerWeights, ReadWeight
from .nearest import quantize_nearest
from .statistics import InputStatistics


class RoundedLayers:
    """A `LayerMethod` from a function of weight [N, K], scheme and what is known of the inputs' powers [K]."""

    def __init__(
        self,
        read: ReadWeight,
        quantize: Callable[[Tensor, Any, Tensor | None], CanonicalWeight],
        powers: Callable[[LayerPlan], dict[str, Tensor]] | None = None,
    ) -> None:
        self._read = read
        self._quantize = quantize
        self._powers = powers

    def quantize(self, layer: LayerPlan) -> LayerWeights:
        """Round the layer's modules."""
        powers = {} if self._powers is None else self._powers(layer)
        result = LayerWeights()
        for name, scheme in layer.quantize.items():
            weight = self._read(name)
            power = relative(powers[name], weight.shape[1]) if name in powers else None
            result.quantized[name] = self._quantize(weight, scheme, power)
        return result

    def skip(self, layer: LayerPlan, done: LayerWeights) -> None:
        """Nothing depends on earlier layers."""


class NearestGroups:
    """A `GroupQuantizer` that looks at no data: what a run does whose text is for the KV cache alone."""

    needs_products = False
    needs_originals = False

    def __init__(self, *, clips: bool) -> None:
        self._clips = clips

    def __call__(
        self,
        weights: dict[str, Tensor],
        schemes: dict[str, Scheme],
        statistics: InputStatistics,
        result: LayerWeights,
    ) -> None:
        """Each module for itself."""
        for name, weight in weights.items():
            result.quantized[name] = quantize_nearest(weight, schemes[name], clips=self._clips)
