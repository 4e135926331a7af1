"""Linear: one matrix product, whatever the scheme of its weight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...kernels.kernel_set import KernelSet
from ...kernels.problems import LinearProblem
from ...quant.canonical import CanonicalWeight


@dataclass(frozen=True, slots=True, eq=False)
class LinearPart:
    """One prepared weight, the kernel that reads it, and its bias [N] or None."""

    run: Callable[[Tensor, Any, Tensor | None], Tensor]
    prepared: Any
    bias: Tensor | None


class Linear:
    """``x [T,K] -> [T,N]``. Several parts stand side by side along N: weights that could not share one matrix."""

    def __init__(self, parts: Sequence[LinearPart]) -> None:
        self._parts = tuple(parts)

    def __call__(self, x: Tensor) -> Tensor:
        if len(self._parts) == 1:
            part = self._parts[0]
            return part.run(x, part.prepared, part.bias)
        return torch.cat([part.run(x, part.prepared, part.bias) for part in self._parts], dim=-1)


def prepare_part(weight: CanonicalWeight, bias: Tensor | None, dtype: torch.dtype, kernels: KernelSet) -> LinearPart:
    """Choose the kernel for a weight and bring the weight into that kernel's layout."""
    out_features, in_features = weight.shape
    problem = LinearProblem(scheme=weight.scheme, in_features=in_features, out_features=out_features, dtype=dtype)
    candidate = kernels.select_candidate("linear", problem)
    assert candidate.prepare is not None, f"linear candidate {candidate.name} has no prepare"
    return LinearPart(candidate.run, candidate.prepare(weight, dtype), bias)
