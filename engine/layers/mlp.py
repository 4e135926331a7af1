"""The gated feed-forward layer: ``down(act(gate(x)) * up(x))``."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from ...kernels.kernel_set import KernelSet
from ...kernels.problems import PlainProblem, QuantizeProblem
from ...kernels.quantized_input import InputFormat, QuantizedInput
from .linear import Linear

# Hugging Face's name of the activation -> operation, and its ``approximate`` argument.
GELU_APPROXIMATION = {"gelu": "none", "gelu_pytorch_tanh": "tanh"}


def gated_activation(
    name: str, dtype: torch.dtype, kernels: KernelSet, wanted: InputFormat | torch.dtype | None = None
) -> Callable[[Tensor], Tensor | QuantizedInput]:
    """The kernel ``gate | up [T,2I] -> [T,I]`` for an activation of a Hugging Face config.

    Its results are quantized as the product behind it wants them (``wanted``), where a kernel does both.
    """
    fused = _quantizing_activation(name, dtype, kernels, wanted) if isinstance(wanted, InputFormat) else None
    return plain_activation(name, dtype, kernels) if fused is None else fused


def plain_activation(name: str, dtype: torch.dtype, kernels: KernelSet) -> Callable[[Tensor], Tensor]:
    """``gated_activation`` without quantized results."""
    if name == "silu":
        return kernels.select("silu_and_mul", PlainProblem(dtype))
    return functools.partial(kernels.select("gelu_and_mul", PlainProblem(dtype)), approximate=GELU_APPROXIMATION[name])


def _quantizing_activation(
    name: str, dtype: torch.dtype, kernels: KernelSet, wanted: InputFormat
) -> Callable[[Tensor], QuantizedInput] | None:
    problem = QuantizeProblem(activation=wanted.how, codes_dtype=wanted.codes_dtype, dtype=dtype)
    fused = kernels.select_fused("silu_and_mul_quantized" if name == "silu" else "gelu_and_mul_quantized", problem)
    if fused is None:
        return None
    options = {} if name == "silu" else {"approximate": GELU_APPROXIMATION[name]}
    return functools.partial(fused, wanted=wanted, **options)


class GatedMLP:
    """``gate_up`` [2I,K] and ``down`` [K,I]. ``activation`` may quantize its result as ``down`` takes it.

    ``gated``, where there is one, gives the activation of ``gate_up``'s product in one go.
    """

    def __init__(
        self,
        gate_up: Linear,
        down: Linear,
        activation: Callable[[Tensor], Tensor | QuantizedInput],
        gated: Callable[[Tensor | QuantizedInput], Tensor] | None = None,
    ) -> None:
        self.input_format = gate_up.input_format
        self._gate_up = gate_up
        self._down = down
        self._activation = activation
        self._gated = gated

    def __call__(self, x: Tensor | QuantizedInput) -> Tensor:
        if self._gated is not None:
            return self._down(self._gated(x))
        return self._down(self._activation(self._gate_up(x)))
