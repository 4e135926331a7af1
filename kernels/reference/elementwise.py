"""Norms, rotary embedding, gated activations and the dense product."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .precision import wide


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """x [T,K] / rms(x) * (weight [K] + offset) -> [T,K]. Gemma stores weight - 1 and passes offset 1."""
    values = wide(x)
    normed = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    return (normed * (weight.to(values.dtype) + offset)).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual); all [T,K]. A faster kernel may write the sum over ``residual``."""
    total = x + residual
    return rms_norm(total, weight, eps, offset), total


def rope(q: Tensor, k: Tensor, cos_sin: Tensor, positions: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Rotary position embedding (arXiv:2104.09864).

    q [T,H,D], k [T,G,D]; cos_sin float32 [P,R], the R/2 cosines and then the R/2 sines of each position; positions
    int64 [T]. Rotates the first R of D; pairs are (i, i+R/2), or (2i, 2i+1) when ``interleaved``. May be done in place.
    """
    half = cos_sin.shape[-1] // 2
    table = cos_sin[positions][:, None, :]
    cos, sin = table[..., :half], table[..., half:]
    return _rotate(q, cos, sin, interleaved), _rotate(k, cos, sin, interleaved)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    size = 2 * cos.shape[-1]
    values = wide(x[..., :size])
    cos, sin = cos.to(values.dtype), sin.to(values.dtype)
    if interleaved:
        first, second = values[..., 0::2], values[..., 1::2]
        rotated = torch.stack((first * cos - second * sin, second * cos + first * sin), -1).flatten(-2)
    else:
        first, second = values.chunk(2, -1)
        rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    return torch.cat((rotated.to(x.dtype), x[..., size:]), -1)


def silu_and_mul(x: Tensor) -> Tensor:
    """silu(gate) * up with x [T,2I] = gate | up -> [T,I]."""
    gate, up = wide(x).chunk(2, -1)
    return (F.silu(gate) * up).to(x.dtype)


def gelu_and_mul(x: Tensor, approximate: str = "none") -> Tensor:
    """gelu(gate) * up with x [T,2I] = gate | up -> [T,I]; ``approximate`` is ``none`` or ``tanh``."""
    gate, up = wide(x).chunk(2, -1)
    return (F.gelu(gate, approximate=approximate) * up).to(x.dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T,K] @ weight [N,K].T + bias [N] -> [T,N]."""
    return F.linear(x, weight, bias)
