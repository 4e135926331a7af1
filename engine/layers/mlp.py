"""The gated feed-forward layer: ``down(act(gate(x)) * up(x))``."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from ...kernels.kernel_set import KernelSet
from ...kernels.problems import PlainProblem
from .linear import Linear

# Hugging Face's name of the activation -> operation, and its ``approximate`` argument.
GELU_APPROXIMATION = {"gelu": "none", "gelu_pytorch_tanh": "tanh"}


def gated_activation(name: str, dtype: torch.dtype, kernels: KernelSet) -> Callable[[Tensor], Tensor]:
    """The kernel ``gate | up [T,2I] -> [T,I]`` for an activation of a Hugging Face config."""
    if name == "silu":
        return kernels.select("silu_and_mul", PlainProblem(dtype))
    return functools.partial(kernels.select("gelu_and_mul", PlainProblem(dtype)), approximate=GELU_APPROXIMATION[name])


class GatedMLP:
    """``gate_up`` [2I,K] and ``down`` [K,I]."""

    def __init__(self, gate_up: Linear, down: Linear, activation: Callable[[Tensor], Tensor]) -> None:
        self._gate_up = gate_up
        self._down = down
        self._activation = activation

    def __call__(self, x: Tensor) -> Tensor:
        return self._down(self._activation(self._gate_up(x)))
