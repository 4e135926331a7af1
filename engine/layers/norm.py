"""RMS normalization (arXiv:1910.07467), alone or with the residual sum before it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...kernels.kernel_set import KernelSet
from ...kernels.problems import PlainProblem, QuantizeProblem
from ...kernels.quantized_input import InputFormat, QuantizedInput


class RMSNorm:
    """``weight`` [K]; normalizes the last dimension of x [T,K]. ``offset`` is added to the weight, in float32."""

    def __init__(self, weight: Tensor, eps: float, kernels: KernelSet, offset: float = 0.0) -> None:
        self.weight = weight
        self.eps = eps
        self.offset = offset
        self._kernels = kernels
        self._norm = kernels.select("rms_norm", PlainProblem(weight.dtype))
        self._add_norm = kernels.select("add_rms_norm", PlainProblem(weight.dtype))

    def __call__(self, x: Tensor) -> Tensor:
        return self._norm(x, self.weight, self.eps, self.offset)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual); the sum may be written over ``residual``."""
        return self._add_norm(x, residual, self.weight, self.eps, self.offset)

    def feeding(self, wanted: InputFormat | torch.dtype | None) -> RMSNorm | QuantizingNorm:
        """This norm; or one that quantizes or rounds its results as the product behind it wants, where a kernel can."""
        if wanted is None:
            return self
        how, codes_dtype = (None, wanted) if isinstance(wanted, torch.dtype) else (wanted.how, wanted.codes_dtype)
        problem = QuantizeProblem(activation=how, codes_dtype=codes_dtype, dtype=self.weight.dtype)
        norm, add_norm = (
            self._kernels.select_fused(op, problem) for op in ("rms_norm_quantized", "add_rms_norm_quantized")
        )
        return self if norm is None or add_norm is None else QuantizingNorm(self, norm, add_norm, wanted)


class QuantizingNorm:
    """``RMSNorm`` with quantized or rounded results."""

    def __init__(
        self,
        plain: RMSNorm,
        norm: Callable[..., Tensor | QuantizedInput],
        add_norm: Callable[..., tuple[Tensor | QuantizedInput, Tensor]],
        wanted: InputFormat | torch.dtype,
    ) -> None:
        self._plain = plain
        self._norm = norm
        self._add_norm = add_norm
        self._wanted = wanted

    def __call__(self, x: Tensor) -> Tensor | QuantizedInput:
        return self._norm(x, self._plain.weight, self._plain.eps, self._wanted, self._plain.offset)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor | QuantizedInput, Tensor]:
        """(norm(x + residual), x + residual); the sum may be written over ``residual``."""
        plain = self._plain
        return self._add_norm(x, residual, plain.weight, plain.eps, self._wanted, plain.offset)
