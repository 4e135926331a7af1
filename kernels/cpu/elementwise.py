"""Norms, rotary embedding and gated activation in C, float32: one call each instead of a chain of torch operations."""

from __future__ import annotations

import torch
from torch import Tensor

from . import step_memory
from .bf16_rows import FEW_ROWS, empty_rows
from .library import functions


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """``reference.rms_norm``; x [..., K] with up to two leading dimensions of any stride."""
    x, weight, shape = _normed(x, weight)
    out = step_memory.empty(x.shape)
    functions.twofold_rms_norm(x.data_ptr(), *shape, None, weight.data_ptr(), eps, offset, out.data_ptr(), None)
    return out


def rms_norm_rounded(x: Tensor, weight: Tensor, eps: float, wanted: torch.dtype, offset: float = 0.0) -> Tensor:
    """``rms_norm`` of x [T,K], of many rows in bfloat16, which is ``wanted``."""
    if x.shape[0] <= FEW_ROWS:
        return rms_norm(x, weight, eps, offset)
    x, weight, shape = _normed(x, weight)
    out = empty_rows(*x.shape)
    functions.twofold_rms_norm_rounded(
        x.data_ptr(), *shape, None, weight.data_ptr(), eps, offset, out.data_ptr(), out.stride(0), None
    )
    return out


def _normed(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, tuple[int, int, int, int, int]]:
    """x and weight as C reads them; rows, of how many the inner stride is, both strides, K."""
    if x.stride(-1) != 1 or x.dim() > 3:
        x = x.contiguous()
    if weight.dtype is not torch.float32:
        weight = weight.float()
    size = x.shape[-1]
    rows = x.numel() // size
    if x.is_contiguous():
        return x, weight, (rows, 1, size, 0, size)
    if x.dim() == 2:
        return x, weight, (rows, 1, x.stride(0), 0, size)
    return x, weight, (rows, x.shape[1], x.stride(0), x.stride(1), size)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    """``reference.add_rms_norm``; x and residual [..., K]. A contiguous residual is overwritten by the sum."""
    x, residual = x.contiguous(), residual.contiguous()
    if weight.dtype is not torch.float32:
        weight = weight.float()
    out = step_memory.empty(x.shape)
    size = x.shape[-1]
    total = residual.data_ptr()
    functions.twofold_rms_norm(
        x.data_ptr(),
        x.numel() // size,
        1,
        size,
        0,
        size,
        total,
        weight.data_ptr(),
        eps,
        offset,
        out.data_ptr(),
        total,
    )
    return out, residual


def add_rms_norm_rounded(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, wanted: torch.dtype, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """``add_rms_norm`` of [T,K], its norm of many rows in bfloat16, which is ``wanted``."""
    if x.shape[0] <= FEW_ROWS:
        return add_rms_norm(x, residual, weight, eps, offset)
    x, residual = x.contiguous(), residual.contiguous()
    x, weight, shape = _normed(x, weight)
    out, total = empty_rows(*x.shape), residual.data_ptr()
    functions.twofold_rms_norm_rounded(
        x.data_ptr(), *shape, total, weight.data_ptr(), eps, offset, out.data_ptr(), out.stride(0), total
    )
    return out, residual


def rope(q: Tensor, k: Tensor, cos_sin: Tensor, positions: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """``reference.rope``, in place where the last dimension is contiguous."""
    q, k = (part if part.stride(2) == 1 else part.contiguous() for part in (q, k))
    tokens, q_heads, _ = q.shape
    functions.twofold_rope(
        q.data_ptr(),
        k.data_ptr(),
        tokens,
        q.stride(0),
        q.stride(1),
        q_heads,
        k.stride(0),
        k.stride(1),
        k.shape[1],
        cos_sin.data_ptr(),
        cos_sin.shape[1] // 2,
        positions.data_ptr(),
        interleaved,
    )
    return q, k


def gelu_and_mul(x: Tensor, approximate: str = "none") -> Tensor:
    """``reference.gelu_and_mul``; x [T,2I]."""
    x, rows, size, out = _gated(x)
    functions.twofold_gelu_and_mul(x.data_ptr(), rows, x.stride(-2), size, approximate == "tanh", out.data_ptr())
    return out


def soft_cap(x: Tensor, limit: float) -> Tensor:
    """``limit * tanh(x / limit)``, written over a contiguous x."""
    x = x.contiguous()
    functions.twofold_soft_cap(x.data_ptr(), x.numel(), limit)
    return x


def sigmoid_gate(x: Tensor, gates: Tensor) -> Tensor:
    """Rows of x [T,K] times sigmoid(gates [T,1]), written over x."""
    assert x.is_contiguous() and gates.is_contiguous(), "rows and gates must be contiguous"
    functions.twofold_sigmoid_gate(x.data_ptr(), gates.data_ptr(), *x.shape)
    return x


def silu_and_mul(x: Tensor) -> Tensor:
    """``reference.silu_and_mul``; x [T,2I]."""
    x, rows, size, out = _gated(x)
    functions.twofold_silu_and_mul(x.data_ptr(), rows, x.stride(-2), size, out.data_ptr())
    return out


def _gated(x: Tensor) -> tuple[Tensor, int, int, Tensor]:
    """x [..,2I] with rows that C can read, how many rows, I, and what takes the result [..,I]."""
    if x.dim() != 2 or x.stride(1) != 1:
        x = x.contiguous()
    size = x.shape[-1] // 2
    return x, x.numel() // (2 * size), size, step_memory.empty((*x.shape[:-1], size))
