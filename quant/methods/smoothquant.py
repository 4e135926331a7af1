"""SmoothQuant (arXiv:2211.10438), for int8 weights and activations: weights take over a part of loud input features.

A token's largest feature decides its scale; dividing loud features by ``max|x|^a / max|w|^(1-a)`` leaves the others
finer steps. ``a`` is searched for each fold, on the error of the outputs with both sides rounded.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from ..canonical import PackedWeight, unpack
from ..eight_bit import EightBitWeight
from ..scheme import Int8, Scheme, WeightOnly
from .gptq import GPTQOptions
from .gptq_layers import GPTQGroups
from .layer_method import LayerWeights
from .scaling import FoldSample
from .statistics import InputStatistics

STRENGTHS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
SEARCHED_TOKENS = 256
SMALLEST = 1e-5


def search_smoothing(sample: FoldSample) -> Tensor | None:
    """The scale of a fold's inputs; None where leaving them alone is best. A `FindScale`."""
    largest = sample.inputs.abs().amax(0).clamp(min=SMALLEST)
    weights = torch.stack([weight.abs().amax(0) for weight in sample.weights.values()]).amax(0).clamp(min=SMALLEST)
    inputs = sample.inputs[:: -(-len(sample.inputs) // SEARCHED_TOKENS)]
    best, best_error = None, _error(inputs, sample, torch.ones_like(largest))
    for strength in STRENGTHS:
        scale = sample.fold.shared((largest**strength / weights ** (1 - strength)).clamp(min=SMALLEST))
        error = _error(inputs, sample, scale)
        if error < best_error:
            best, best_error = scale, error
    return best


def _error(inputs: Tensor, sample: FoldSample, scale: Tensor) -> float:
    rounded = _round_rows(inputs / scale)
    return sum(
        float((rounded @ _round_rows(weight * scale).T - inputs @ weight.T).square().sum())
        for weight in sample.weights.values()
    )


def _round_rows(values: Tensor) -> Tensor:
    """int8 with one scale per row, dequantized."""
    scale = values.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
    return (values / scale).round_().mul_(scale)


class Int8Groups:
    """A `GroupQuantizer`: GPTQ to int8, one scale per output feature. ``search_smoothing`` comes before it."""

    needs_products = True

    def __init__(self, options: GPTQOptions) -> None:
        self._integers = GPTQGroups(dataclasses.replace(options, positive=True))
        self.needs_originals = self._integers.needs_originals

    def __call__(
        self,
        weights: dict[str, Tensor],
        schemes: dict[str, Scheme],
        statistics: InputStatistics,
        result: LayerWeights,
    ) -> None:
        """Unsigned codes around 128 become signed ones."""
        integers: dict[str, Scheme] = dict.fromkeys(weights, WeightOnly(8, -1))
        self._integers(weights, integers, statistics, result)
        for name, scheme in schemes.items():
            packed = result.quantized[name]
            assert isinstance(packed, PackedWeight) and isinstance(scheme, Int8), f"{scheme} is not int8"
            codes = unpack(packed.qweight, 8, packed.shape[1]).to(torch.int16) - 128
            result.quantized[name] = EightBitWeight(scheme, codes.to(torch.int8), packed.scales.float())
