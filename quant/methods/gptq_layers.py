"""GPTQ for modules that read the same input: their rows are independent, so they are rounded as one matrix."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...errors import CheckpointError
from ..row_slices import rows_of
from ..scheme import Scheme, WeightOnly
from .gptq import GPTQOptions, quantize_gptq
from .layer_method import LayerWeights
from .statistics import InputStatistics


class GPTQGroups:
    """A `GroupQuantizer`."""

    needs_products = True

    def __init__(self, options: GPTQOptions) -> None:
        self.needs_originals = options.correction > 0
        self._options = options

    def __call__(
        self,
        weights: dict[str, Tensor],
        schemes: dict[str, Scheme],
        statistics: InputStatistics,
        result: LayerWeights,
    ) -> None:
        """Modules of one scheme together."""
        for scheme in dict.fromkeys(schemes.values()):
            assert isinstance(scheme, WeightOnly), f"GPTQ rounds to integers, not {scheme}"
            self._same_scheme(
                [name for name in weights if schemes[name] == scheme], weights, scheme, statistics, result
            )

    def _same_scheme(
        self,
        names: list[str],
        weights: dict[str, Tensor],
        scheme: WeightOnly,
        statistics: InputStatistics,
        result: LayerWeights,
    ) -> None:
        stacked = torch.cat([weights[name] for name in names])
        try:
            outcome = quantize_gptq(stacked, statistics, scheme, self._options)
        except ValueError as error:
            raise CheckpointError(f"{names[0]}: {error}") from None
        first = 0
        for name in names:
            last = first + weights[name].shape[0]
            result.quantized[name] = rows_of(outcome.weight, first, last)
            first = last
        if outcome.fallback is not None:
            result.notes += [f"{name} was rounded to nearest: {outcome.fallback}" for name in names]
        if not math.isnan(outcome.error):
            result.output_errors.update(dict.fromkeys(names, outcome.error))
