"""RMS normalization (arXiv:1910.07467), alone or with the residual sum before it."""

from __future__ import annotations

from torch import Tensor

from ...kernels.kernel_set import KernelSet
from ...kernels.problems import PlainProblem


class RMSNorm:
    """``weight`` [K]; normalizes the last dimension of x [T,K]. ``offset`` is added to the weight, in float32."""

    def __init__(self, weight: Tensor, eps: float, kernels: KernelSet, offset: float = 0.0) -> None:
        self.weight = weight
        self.eps = eps
        self.offset = offset
        self._norm = kernels.select("rms_norm", PlainProblem(weight.dtype))
        self._add_norm = kernels.select("add_rms_norm", PlainProblem(weight.dtype))

    def __call__(self, x: Tensor) -> Tensor:
        return self._norm(x, self.weight, self.eps, self.offset)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual); the sum may be written over ``residual``."""
        return self._add_norm(x, residual, self.weight, self.eps, self.offset)
