"""Quantized activations in plain torch: the definition of right for schemes that quantize the input of a product.

``quantize_activation`` gives codes and scales, as an 8-bit product takes them. ``fake_quantize`` rounds the input to
what the quantized type can hold and gives it back in its own dtype; the product with the dequantized weight is then
what an exact kernel for the scheme computes, up to the order of its sums.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ...platforms.fp8 import fp8_max
from ...quant.fp4 import FP4_MAX, round_fp4
from ...quant.scheme import Activation, Element
from ..quantized_input import QuantizedInput

# Half the span of the 255 steps between -128 and 127: compressed-tensors (and so llm-compressor's calibration) scales
# symmetric int8 values to it, so that the largest one clips by half a step. Other engines scale to 127.
INT8_HALF_SPAN = 127.5
_FP8 = torch.float8_e4m3fn
_TINY = torch.finfo(torch.float32).tiny
# The scale of a group of zeros in NVFP4, as compressed-tensors sets it.
_NVFP4_EMPTY = 0.125


def fake_quantize(x: Tensor, how: Activation, scale: Tensor | None = None, zero: Tensor | None = None) -> Tensor:
    """x [T,K] rounded as ``how`` says; ``scale`` and ``zero`` are the float32 scalars of static activations.

    int8     round(x / scale + zero) clamped to -128..127. Dynamic: scale = amax / 127.5, or (max - min) / 255 with the
             zero point that maps min to -128, 0 always included.
    fp8      e4m3(x / scale), saturating at 448. Dynamic: scale = amax / 448.
    powers of two  scale = 2 ** (e - emax) for amax = m * 2 ** e, 1 <= m < 2; from m = 1.75 on, e + 1. emax is 8 for fp8
             and 2 for fp4.
    fp4 without powers of two (NVFP4)  group scale = e4m3(scale * amax / 6) / scale.
    """
    wide = x.float()
    if how.group_size == 0 and how.dynamic:
        return _whole(wide.reshape(1, -1), how, scale, zero).view(x.shape).to(x.dtype)
    if how.group_size <= 0:
        return _whole(wide, how, scale, zero).to(x.dtype)
    columns = x.shape[-1]
    groups = F.pad(wide, (0, -columns % how.group_size)).unflatten(-1, (-1, how.group_size))
    return _whole(groups, how, scale, zero).flatten(-2)[..., :columns].to(x.dtype)


def quantize_activation(
    x: Tensor,
    how: Activation,
    scale: Tensor | None = None,
    zero: Tensor | None = None,
    *,
    codes_dtype: torch.dtype | None = None,
) -> QuantizedInput:
    """The codes and scales of ``fake_quantize`` for x [T,K] and an 8-bit type.

    ``codes_dtype`` is int8, for fp8 e4m3fn (the default), e4m3fnuz, or a wider float that holds e4m3fn's values. In
    e4m3fnuz a code means half as much and scales are twice as large, static ones by the caller, for the same values.
    """
    assert how.bits == 8, f"{how} has no 8-bit codes"
    kind = codes_dtype or (torch.int8 if how.element is Element.INT8 else _FP8)
    columns, wide = x.shape[-1], x.float()
    size = how.group_size if how.group_size > 0 else columns
    rows = wide.flatten()[None] if how.group_size == 0 else F.pad(wide, (0, -columns % size)).unflatten(-1, (-1, size))
    if how.dynamic:
        scale, zero = _dynamic_scale(rows, how, kind)
    assert scale is not None, f"{how} needs a stored scale"
    groups = -(-columns // size)
    codes = _codes(rows, kind, scale, zero).reshape(x.shape[0], groups * size)[:, :columns].contiguous()
    shape = (1, 1) if how.group_size == 0 else (x.shape[0], groups)
    whole = None if zero is None else zero.reshape(shape).to(torch.int32)
    return QuantizedInput(codes, scale.float().reshape(shape), whole, how, x.dtype)


def _dynamic_scale(rows: Tensor, how: Activation, kind: torch.dtype) -> tuple[Tensor, Tensor | None]:
    if rows.numel() == 0:
        rows = rows.new_zeros((*rows.shape[:-1], 1))
    if how.element is Element.INT8:
        return _int8_scale(rows, how.symmetric)
    if how.power_of_two:
        return _power_of_two_scale(rows, 7 if kind is torch.float8_e4m3fnuz else 8), None
    return _amax(rows) / _limit(kind), None


def _codes(rows: Tensor, kind: torch.dtype, scale: Tensor, zero: Tensor | None) -> Tensor:
    if kind is torch.int8:
        return (rows / scale + (0.0 if zero is None else zero)).round().clamp(-128, 127).to(kind)
    limit = _limit(kind)
    values = (rows / scale).clamp(-limit, limit)
    return values.to(kind) if kind.itemsize == 1 else values.to(_FP8).to(kind)


def _limit(kind: torch.dtype) -> float:
    return fp8_max(kind if kind.itemsize == 1 else _FP8)


def _whole(x: Tensor, how: Activation, scale: Tensor | None, zero: Tensor | None) -> Tensor:
    """Each row of x [..., C] shares a scale."""
    assert how.dynamic or scale is not None, f"{how} needs a stored scale"
    if how.element is Element.INT8:
        if how.dynamic:
            scale, zero = _int8_scale(x, how.symmetric)
        assert scale is not None
        return _int8(x, scale, zero)
    if how.element is Element.FP4 and not how.power_of_two:
        assert scale is not None, "NVFP4 activations need the scale of their scales"
        local = _nvfp4_scale(x, scale)
    elif how.power_of_two:
        local = _power_of_two_scale(x, 8 if how.element is Element.FP8 else 2)
    else:
        local = scale if scale is not None else _amax(x) / fp8_max(_FP8)
    return _ROUND[how.element](x, local)


def _int8(x: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
    offset = 0.0 if zero is None else zero
    return ((x / scale + offset).round().clamp(-128, 127) - offset) * scale


def _int8_scale(x: Tensor, symmetric: bool) -> tuple[Tensor, Tensor | None]:
    if symmetric:
        return _amax(x) / INT8_HALF_SPAN, None
    low, high = (side.clamp(max=0) if i == 0 else side.clamp(min=0) for i, side in enumerate(_range(x)))
    scale = ((high - low) / 255).clamp(min=_TINY)
    return scale, (-128 - low / scale).round().clamp(-128, 127)


def _range(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)


def _amax(x: Tensor) -> Tensor:
    """Largest magnitude of each row, never so small that dividing by a scale made of it overflows."""
    return x.abs().amax(-1, keepdim=True).clamp(min=2.0**-100)


def _fp8_round(x: Tensor, scale: Tensor) -> Tensor:
    limit = fp8_max(_FP8)
    return (x / scale).clamp(-limit, limit).to(_FP8).float() * scale


def _fp4_round(x: Tensor, scale: Tensor) -> Tensor:
    return round_fp4(x / scale) * scale


_ROUND: dict[Element, Callable[[Tensor, Tensor], Tensor]] = {Element.FP8: _fp8_round, Element.FP4: _fp4_round}


def _power_of_two_scale(x: Tensor, emax: int) -> Tensor:
    mantissa, exponent = torch.frexp(_amax(x))
    # frexp's mantissa lies in [0.5, 1): m is twice that, e one less.
    exponent = exponent - 1 + (mantissa >= 0.875).to(exponent.dtype) - emax
    return torch.ldexp(torch.ones_like(mantissa), exponent.clamp(-126, 127))


def _nvfp4_scale(x: Tensor, scale: Tensor) -> Tensor:
    limit = fp8_max(_FP8)
    local = (scale * x.abs().amax(-1, keepdim=True) / FP4_MAX).clamp(max=limit).to(_FP8).float()
    return torch.where(local == 0, torch.full_like(local, _NVFP4_EMPTY), local) / scale
