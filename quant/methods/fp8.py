"""fp8 with input scales that are calibrated."""

from __future__ import annotations

import torch
from torch import Tensor

from ...platforms.fp8 import fp8_max
from ..scheme import Fp8, Scheme
from .eight_bit import CODES, quantize_eight_bit
from .layer_method import LayerWeights
from .statistics import InputStatistics


class Fp8Groups:
    """A `GroupQuantizer`: modules that read one input share its static scale, the largest value seen."""

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
        largest = float(statistics.max_abs.max())
        for name, weight in weights.items():
            scheme = schemes[name]
            assert isinstance(scheme, Fp8), f"fp8 rounds to 8-bit floats, not {scheme}"
            is_static = scheme.activation is not None and not scheme.activation.dynamic
            scale = input_scale(largest) if is_static else None
            if is_static and statistics.num_tokens == 0:
                source = "from its siblings" if largest else "1"
                result.notes.append(f"{name}: no calibration token reached it; its input scale is {source}")
            result.quantized[name] = quantize_eight_bit(weight, scheme, scale)


def input_scale(largest: float) -> Tensor:
    """The scale of inputs up to ``largest``: 1 where nothing was ever seen."""
    return torch.tensor(largest / fp8_max(CODES) if largest > 0 else 1.0)
