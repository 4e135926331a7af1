"""Linear: one matrix product, whatever the scheme of its weight."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...kernels.kernel_set import KernelSet
from ...kernels.problems import LinearProblem
from ...kernels.quantized_input import InputFormat, QuantizedInput
from ...kernels.registry import Candidate
from ...quant.canonical import CanonicalWeight


@dataclass(frozen=True, slots=True, eq=False)
class LinearPart:
    """One prepared weight, the kernel that reads it, and its bias [N] or None.

    ``input_format``: how inputs may come quantized, or rounded to a dtype; None: not at all.
    ``run_gated``: as in ``Candidate``.
    """

    run: Callable[[Tensor | QuantizedInput, Any, Tensor | None], Tensor]
    prepared: Any
    bias: Tensor | None
    input_format: InputFormat | torch.dtype | None = None
    run_gated: Mapping[str, Callable[[Tensor | QuantizedInput, Any, Tensor | None], Tensor]] = field(
        default_factory=dict
    )


class Linear:
    """``x [T,K] -> [T,N]``. Several parts stand side by side along N: weights that could not share one matrix."""

    def __init__(self, parts: Sequence[LinearPart]) -> None:
        self._parts = tuple(parts)
        self.input_format = _common_format(parts)

    def __call__(self, x: Tensor | QuantizedInput) -> Tensor:
        """``x`` may be quantized or rounded as ``input_format`` says, where that is not None."""
        if len(self._parts) == 1:
            part = self._parts[0]
            return part.run(x, part.prepared, part.bias)
        return torch.cat([part.run(x, part.prepared, part.bias) for part in self._parts], dim=-1)

    def gated(
        self, activation: str, wanted: InputFormat | torch.dtype | None
    ) -> Callable[[Tensor | QuantizedInput], Tensor] | None:
        """x -> the activation of the first half of this product's features times the second.

        For another product, that takes ``wanted`` (None: floats). None where no kernel does it all.
        """
        part = self._parts[0] if len(self._parts) == 1 else None
        run_gated = None if part is None else part.run_gated.get(activation)
        if part is None or run_gated is None or wanted is not part.input_format:
            return None
        return lambda x: run_gated(x, part.prepared, part.bias)


def prepare_part(
    weight: CanonicalWeight, bias: Tensor | None, dtype: torch.dtype, kernels: KernelSet, *, is_sensitive: bool = False
) -> LinearPart:
    """Choose the kernel for a weight and bring the weight into that kernel's layout."""
    rows, columns = weight.shape
    problem = LinearProblem(
        scheme=weight.scheme, in_features=columns, out_features=rows, dtype=dtype, is_sensitive=is_sensitive
    )
    candidate = kernels.select_candidate("linear", problem)
    assert candidate.prepare is not None, f"linear candidate {candidate.name} has no prepare"
    return linear_part(candidate, candidate.prepare(weight, dtype), bias)


def linear_part(candidate: Candidate, prepared: Any, bias: Tensor | None) -> LinearPart:
    """A weight that a candidate prepared."""
    wanted = candidate.input_format and candidate.input_format(prepared)
    return LinearPart(candidate.run, prepared, bias, wanted, candidate.run_gated)


def _common_format(parts: Sequence[LinearPart]) -> InputFormat | torch.dtype | None:
    """How one quantized or rounded input serves every part; None where there is no such."""
    first = parts[0].input_format if parts else None
    return first if all(_agree(first, part.input_format) for part in parts[1:]) else None


def _agree(first: InputFormat | torch.dtype | None, other: InputFormat | torch.dtype | None) -> bool:
    if isinstance(first, InputFormat) and isinstance(other, InputFormat):
        return first.agrees(other)
    return first is other
