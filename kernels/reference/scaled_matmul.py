"""Products of 8-bit codes, and the operations in front of them that give quantized results."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...quant.eight_bit import EightBitWeight, spread
from ..quantized_input import InputFormat, QuantizedInput
from .activation_quantization import quantize_activation
from .elementwise import add_rms_norm, gelu_and_mul, rms_norm, silu_and_mul


def scaled_matmul(x: QuantizedInput, weight: EightBitWeight, bias: Tensor | None = None) -> Tensor:
    """x [T,K] @ weight [N,K].T + bias [N] -> [T,N] of ``x.dtype``.

    Over each run of features that share their scales, products of ``code - zero`` are summed; int8 ones exactly. The
    sums are scaled and added in float64 and rounded once.
    """
    columns = weight.shape[1]
    size = math.gcd(x.group_size, weight.scheme.resolved_block(weight.shape)[1]) or 1
    total = torch.zeros(x.shape[0], weight.shape[0], dtype=torch.float64, device=x.codes.device)
    for start in range(0, columns, size):
        part = slice(start, min(start + size, columns))
        x_scale, x_zero = (_of_group(values, start // x.group_size) for values in (x.scale, x.zero))
        w_scale, w_zero = (_per_output(weight, values, start) for values in (weight.scales, weight.zeros))
        left, right = x.codes[:, part].double(), weight.codes[:, part].double()
        left = left if x_zero is None else left - x_zero
        right = right if w_zero is None else right - w_zero
        assert x_scale is not None and w_scale is not None
        total += left @ right.T * x_scale * w_scale.T
    return (total if bias is None else total + bias.double()).to(x.dtype)


def _of_group(values: Tensor | None, group: int) -> Tensor | None:
    """[T,1] or [1,1]: the values of one group of input features."""
    if values is None:
        return None
    return values[:, min(group, values.shape[1] - 1)].double()[:, None]


def _per_output(weight: EightBitWeight, values: Tensor | None, start: int) -> Tensor | None:
    """[N,1] or [1,1]: the values of the blocks that feature ``start`` lies in."""
    if values is None:
        return None
    rows, columns = weight.scheme.resolved_block(weight.shape)
    return spread(values[:, start // columns, None].double(), (rows, 1), (weight.shape[0], 1))


def _quantized(x: Tensor, wanted: InputFormat) -> QuantizedInput:
    return quantize_activation(x, wanted.how, wanted.scale, wanted.zero, codes_dtype=wanted.codes_dtype)


def rms_norm_quantized(
    x: Tensor, weight: Tensor, eps: float, wanted: InputFormat, offset: float = 0.0
) -> QuantizedInput:
    """``rms_norm``'s result [T,K], rounded to x's dtype and then quantized."""
    return _quantized(rms_norm(x, weight, eps, offset), wanted)


def add_rms_norm_quantized(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, wanted: InputFormat, offset: float = 0.0
) -> tuple[QuantizedInput, Tensor]:
    """(``rms_norm_quantized(x + residual)``, x + residual)."""
    normed, total = add_rms_norm(x, residual, weight, eps, offset)
    return _quantized(normed, wanted), total


def silu_and_mul_quantized(x: Tensor, wanted: InputFormat) -> QuantizedInput:
    """``silu_and_mul``'s result [T,I], rounded to x's dtype and then quantized."""
    return _quantized(silu_and_mul(x), wanted)


def gelu_and_mul_quantized(x: Tensor, wanted: InputFormat, approximate: str = "none") -> QuantizedInput:
    """``gelu_and_mul``'s result [T,I], rounded to x's dtype and then quantized."""
    return _quantized(gelu_and_mul(x, approximate), wanted)
