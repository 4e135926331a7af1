"""Token embedding and the language-model head."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .linear import Linear


class Embedding:
    """``weight`` [V,K]; ids [T] -> [T,K], times ``scale``, which is rounded to the weight's dtype first (Gemma)."""

    def __init__(self, weight: Tensor, scale: float = 1.0) -> None:
        self.weight = weight
        self._scale = float(torch.tensor(scale, dtype=weight.dtype))

    def __call__(self, input_ids: Tensor) -> Tensor:
        rows = F.embedding(input_ids, self.weight)
        return rows if self._scale == 1.0 else rows * self._scale


class Head:
    """hidden [R,K] -> logits float32 [R,V]; ``soft_cap`` bounds them smoothly, 0.0 means none."""

    def __init__(self, projection: Linear, soft_cap: float = 0.0) -> None:
        self._projection = projection
        self._soft_cap = soft_cap

    def __call__(self, hidden: Tensor) -> Tensor:
        logits = self._projection(hidden).float()
        return logits if not self._soft_cap else (logits / self._soft_cap).tanh_().mul_(self._soft_cap)
