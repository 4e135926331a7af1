"""Round to nearest in 8 bits: e4m3 with one scale per block from its largest magnitude, int8 with rtn's scales."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ...platforms.fp8 import fp8_max
from ..eight_bit import EightBitWeight, spread
from ..packing import unpack
from ..scheme import Fp8, Int8, WeightOnly
from .rtn import quantize_rtn

CODES = torch.float8_e4m3fn


def quantize_eight_bit(weight: Tensor, scheme: Int8 | Fp8, input_scale: Tensor | None = None) -> EightBitWeight:
    """Quantize ``weight`` [N, K] (finite, any floating-point type); scales come out in float32.

    ``input_scale`` is that of static activations. int8 has a scale per output feature, and per group of input features
    where the scheme says so.
    """
    return _fp8(weight, scheme, input_scale) if isinstance(scheme, Fp8) else _int8(weight, scheme, input_scale)


def _fp8(weight: Tensor, scheme: Fp8, input_scale: Tensor | None) -> EightBitWeight:
    values = weight.float()
    (rows, columns), shape = scheme.resolved_block((weight.shape[0], weight.shape[1])), values.shape
    padded = F.pad(values, (0, -shape[1] % columns, 0, -shape[0] % rows))
    largest = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows)).abs().amax(dim=(1, 3))
    limit = fp8_max(CODES)
    scales = torch.where(largest > 0, largest / limit, 1.0)
    codes = (values / spread(scales, (rows, columns), (shape[0], shape[1]))).clamp_(-limit, limit)
    return EightBitWeight(scheme, codes.to(CODES), scales, input_scale=input_scale)


def _int8(weight: Tensor, scheme: Int8, input_scale: Tensor | None) -> EightBitWeight:
    assert scheme.block[0] == 1, f"int8 is rounded per output feature, not {scheme}"
    packed = quantize_rtn(weight, WeightOnly(8, scheme.block[1], scheme.symmetric), positive=True)
    codes = (unpack(packed.qweight, 8, weight.shape[1]).to(torch.int16) - 128).to(torch.int8)
    zeros = None if packed.zeros is None else (packed.zeros.to(torch.int16) - 128).to(torch.int8)
    return EightBitWeight(scheme, codes, packed.scales.float(), zeros, input_scale)
