"""The 8-bit float formats: the one table of their limits."""

from __future__ import annotations

import torch

from ..errors import ConfigError
from .spec import Fp8Kind

# Largest magnitude used when scaling. e4m3fnuz reaches 240, but 224 keeps dynamic quantization off its last step, where
# accuracy measurably suffers; it is what other engines use, so checkpoints agree.
FP8_MAX = {
    torch.float8_e4m3fn: 448.0,
    torch.float8_e4m3fnuz: 224.0,
    torch.float8_e5m2: 57344.0,
    torch.float8_e5m2fnuz: 57344.0,
}

_DTYPES = {Fp8Kind.OCP: torch.float8_e4m3fn, Fp8Kind.FNUZ: torch.float8_e4m3fnuz}


def fp8_dtype(kind: Fp8Kind) -> torch.dtype:
    """The e4m3 dtype of a kind; ``NONE`` raises ConfigError."""
    if kind not in _DTYPES:
        raise ConfigError(f"no 8-bit float of kind {kind.value}; it must be {' or '.join(k.value for k in _DTYPES)}")
    return _DTYPES[kind]


def fp8_max(dtype: torch.dtype) -> float:
    """The largest magnitude to scale to, for one of the four 8-bit float dtypes."""
    if dtype not in FP8_MAX:
        raise ConfigError(f"{dtype} is no 8-bit float; it must be one of {', '.join(map(str, FP8_MAX))}")
    return FP8_MAX[dtype]


def fp8_quantize(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize with one dynamic scale: ``x ~ quantized.float() * scale``.

    ``x`` any shape and float dtype; infinities count as the largest finite magnitude of x. Returns (quantized, scale
    float32 scalar tensor). Values are clamped before the cast, because a cast out of range may give NaN.
    """
    limit = fp8_max(dtype)
    values = x.float()
    finite = torch.where(values.isfinite(), values, torch.zeros_like(values))
    largest = finite.abs().amax() if finite.numel() else finite.new_zeros(())
    scale = torch.where(largest > 0, largest / limit, torch.ones_like(largest))
    scale = scale.clamp(min=torch.finfo(torch.float32).tiny)
    return (values / scale).nan_to_num(nan=0.0).clamp(-limit, limit).to(dtype), scale
