"""Round to nearest in 8 bits: e4m3 with the best scale for each block, int8 with rtn's scales."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from ...platforms.fp8 import fp8_max
from ..eight_bit import EightBitWeight, spread
from ..packing import unpack
from ..scheme import Fp8, Int8, WeightOnly
from .rtn import quantize_rtn

CODES = torch.float8_e4m3fn
# Scales of fp8 that are tried, up to twice the smallest one that holds all weights.
SCALES_PER_BINADE = 8


def quantize_eight_bit(weight: Tensor, scheme: Int8 | Fp8, input_scale: Tensor | None = None) -> EightBitWeight:
    """Quantize ``weight`` [N, K] (finite, any floating-point type); scales come out in float32.

    ``input_scale`` is that of static activations. int8 has a scale per output feature, and per group of input features
    where the scheme says so.
    """
    return _fp8(weight, scheme, input_scale) if isinstance(scheme, Fp8) else _int8(weight, scheme, input_scale)


def _fp8(weight: Tensor, scheme: Fp8, input_scale: Tensor | None) -> EightBitWeight:
    """With the scales of least squared error, from the smallest that cuts no weight off to twice that.

    Steps of a float grow with the number: what a scale decides is where between powers of two the weights lie.
    """
    values = weight.float()
    blocks = _Blocks(scheme.resolved_block((weight.shape[0], weight.shape[1])), (values.shape[0], values.shape[1]))
    largest = blocks.reduce(values.abs(), "amax")
    smallest = torch.where(largest > 0, largest / fp8_max(CODES), 1.0)
    best, least = smallest, torch.full_like(smallest, torch.inf)
    for step in range(SCALES_PER_BINADE):
        scales = smallest * 2.0 ** (step / SCALES_PER_BINADE)
        spread_scales = blocks.spread(scales)
        errors = _fp8_codes(values, spread_scales).to(values.dtype).mul_(spread_scales).sub_(values).square_()
        total = blocks.reduce(errors, "sum")
        best, least = torch.where(total < least, scales, best), torch.minimum(total, least)
    return EightBitWeight(scheme, _fp8_codes(values, blocks.spread(best)), best, input_scale=input_scale)


def _fp8_codes(values: Tensor, scales: Tensor) -> Tensor:
    limit = fp8_max(CODES)
    return (values / scales).clamp_(-limit, limit).to(CODES)


@dataclass(frozen=True, slots=True)
class _Blocks:
    """How blocks of (rows, columns) ``size`` cover a matrix of ``shape``."""

    size: tuple[int, int]
    shape: tuple[int, int]

    def reduce(self, values: Tensor, how: Literal["amax", "sum"]) -> Tensor:
        """One number a block, of ``values`` >= 0."""
        (rows, columns), (height, width) = self.size, self.shape
        padded = F.pad(values, (0, -width % columns, 0, -height % rows))
        parts = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
        return parts.amax(dim=(1, 3)) if how == "amax" else parts.sum(dim=(1, 3))

    def spread(self, values: Tensor) -> Tensor:
        return spread(values, self.size, self.shape)


def _int8(weight: Tensor, scheme: Int8, input_scale: Tensor | None) -> EightBitWeight:
    assert scheme.block[0] == 1, f"int8 is rounded per output feature, not {scheme}"
    packed = quantize_rtn(weight, WeightOnly(8, scheme.block[1], scheme.symmetric), positive=True)
    codes = (unpack(packed.qweight, 8, weight.shape[1]).to(torch.int16) - 128).to(torch.int8)
    zeros = None if packed.zeros is None else (packed.zeros.to(torch.int16) - 128).to(torch.int8)
    return EightBitWeight(scheme, codes, packed.scales.float(), zeros, input_scale)
