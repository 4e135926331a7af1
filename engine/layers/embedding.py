"""Token embedding and the language-model head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels.kernel_set import KernelSet
from ...kernels.problems import PlainProblem
from ...quant.canonical import PackedWeight, dequantize
from .linear import Linear, LinearPart


@dataclass(frozen=True, slots=True, eq=False)
class HeadRows:
    """The rows of a head [V,K] that is the embedding as well; ``look_up`` (ids, prepared weight) gives them.

    ``part`` is the head; None: only its sizes are known.
    """

    shape: tuple[int, int]
    part: LinearPart | None
    look_up: Callable[[Tensor, Any], Tensor]


class Embedding:
    """``weight`` [V,K]; ids [T] -> [T,K], times ``scale``, which is rounded to the weight's dtype first (Gemma).

    A packed weight stays packed: its rows are dequantized as they are looked up, to ``dtype``, in one kernel where
    ``kernels`` has one.
    """

    def __init__(
        self,
        weight: Tensor | PackedWeight | HeadRows,
        scale: float = 1.0,
        dtype: torch.dtype | None = None,
        kernels: KernelSet | None = None,
    ) -> None:
        self.weight = weight
        self._dtype = dtype or (weight.dtype if isinstance(weight, Tensor) else torch.float32)
        self._scale = float(torch.tensor(scale, dtype=self._dtype))
        self._embed: Callable[[Tensor, PackedWeight], Tensor] | None = None
        if kernels is not None and isinstance(weight, PackedWeight):
            self._embed = kernels.select_fused("embed_packed", PlainProblem(self._dtype))

    def __call__(self, input_ids: Tensor) -> Tensor:
        rows = self._rows(input_ids)
        return rows if self._scale == 1.0 else rows * self._scale

    def _rows(self, input_ids: Tensor) -> Tensor:
        weight = self.weight
        if isinstance(weight, Tensor):
            return F.embedding(input_ids, weight)
        if isinstance(weight, HeadRows):
            assert weight.part is not None, "a surveyed model cannot compute"
            return weight.look_up(input_ids, weight.part.prepared)
        if self._embed is not None:
            return self._embed(input_ids, weight)
        chosen = replace(
            weight,
            shape=(input_ids.numel(), weight.shape[1]),
            qweight=weight.qweight[input_ids],
            scales=weight.scales[input_ids],
            zeros=None if weight.zeros is None else weight.zeros[input_ids],
        )
        return dequantize(chosen, self._dtype)


class Head:
    """hidden [R,K] -> logits float32 [R,V]; ``soft_cap`` bounds them smoothly, 0.0 means none."""

    def __init__(self, projection: Linear, kernels: KernelSet, soft_cap: float = 0.0) -> None:
        self._projection = projection
        self._soft_cap = soft_cap
        self._bound = kernels.select_fused("soft_cap", PlainProblem(torch.float32)) if soft_cap else None

    def __call__(self, hidden: Tensor) -> Tensor:
        logits = self._projection(hidden).float()
        if not self._soft_cap:
            return logits
        if self._bound is not None:
            return self._bound(logits, self._soft_cap)
        return (logits / self._soft_cap).tanh_().mul_(self._soft_cap)
