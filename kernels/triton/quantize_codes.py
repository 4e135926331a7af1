"""Scales and codes of quantized activations, as functions that kernels call on a tile in registers.

``ELEMENT`` is ``int8``, ``fp8`` (the codes' own e4m3 type) or ``wide`` (e4m3fn's values in a wider float). ``LIMIT`` is
the magnitude that a scale maps the largest value to: 127.5 for int8, 448 for e4m3fn, 224 for e4m3fnuz.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ...platforms.fp8 import fp8_max
from ...quant.scheme import Activation
from ..reference.activation_quantization import INT8_HALF_SPAN


@triton.jit
def round_even(x: tl.tensor) -> tl.tensor:
    """To the nearest integer, ties to even, for |x| < 2^22: adding 1.5 * 2^23 leaves no bits for a fraction."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def round_e4m3(x: tl.tensor) -> tl.tensor:
    """float32 to the nearest value of e4m3fn, ties to even, for |x| <= 448: the same trick with the magic number of
    each value's own exponent, at least 2^-6."""
    exponent = tl.maximum(x.to(tl.int32, bitcast=True) & 0x7F800000, 0x3C800000)
    magic = exponent.to(tl.float32, bitcast=True) * 1572864.0
    return (x + magic) - magic


@triton.jit
def scale_and_zero(
    low: tl.tensor,
    high: tl.tensor,
    SYMMETRIC: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    LIMIT: tl.constexpr,
    MAX_EXPONENT: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """(scale, zero) of values between ``low`` and ``high``."""
    if SYMMETRIC:
        # Never so small that dividing by a scale made of it overflows.
        largest = tl.maximum(tl.maximum(high, -low), 7.888609052210118e-31)
        if POWER_OF_TWO:
            # From a mantissa of 1.75 on the next exponent: adding a quarter of the mantissa's range carries there.
            exponent = ((largest.to(tl.int32, bitcast=True) + 0x200000) >> 23) - MAX_EXPONENT
            scale = (tl.minimum(tl.maximum(exponent, 1), 254) << 23).to(tl.float32, bitcast=True)
        else:
            scale = largest / LIMIT
        zero = scale * 0.0
    else:
        low = tl.minimum(low, 0.0)
        scale = tl.maximum((tl.maximum(high, 0.0) - low) / 255.0, 1.1754943508222875e-38)
        zero = round_even(tl.minimum(tl.maximum(-128.0 - low / scale, -128.0), 127.0))
    return scale, zero


@triton.jit
def codes_of(
    x: tl.tensor, scale: tl.tensor, zero: tl.tensor, ELEMENT: tl.constexpr, SYMMETRIC: tl.constexpr, LIMIT: tl.constexpr
) -> tl.tensor:
    """The codes of values, still in float32: int8 as integers, ``wide`` rounded, fp8 for the cast to round."""
    scaled = x / scale
    if ELEMENT == "int8":
        if not SYMMETRIC:
            scaled += zero
        codes = round_even(tl.minimum(tl.maximum(scaled, -128.0), 127.0))
    else:
        codes = tl.minimum(tl.maximum(scaled, -LIMIT), LIMIT)
        if ELEMENT == "wide":
            codes = round_e4m3(codes)
    return codes


def element_constants(how: Activation, codes_dtype: torch.dtype) -> dict[str, Any]:
    """The compile-time arguments that say what a code is."""
    wide = codes_dtype.itemsize > 1
    limit = INT8_HALF_SPAN if codes_dtype is torch.int8 else fp8_max(torch.float8_e4m3fn if wide else codes_dtype)
    return {
        "ELEMENT": "int8" if codes_dtype is torch.int8 else "wide" if wide else "fp8",
        "POWER_OF_TWO": how.power_of_two,
        "LIMIT": limit,
        "MAX_EXPONENT": 7 if codes_dtype is torch.float8_e4m3fnuz else 8,
    }
