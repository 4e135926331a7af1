"""Token embedding and the language-model head."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from .linear import Linear


class Embedding:
    """``weight`` [V,K]; ids [T] -> [T,K]."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __call__(self, input_ids: Tensor) -> Tensor:
        return F.embedding(input_ids, self.weight)


class Head:
    """hidden [R,K] -> logits float32 [R,V]."""

    def __init__(self, projection: Linear) -> None:
        self._projection = projection

    def __call__(self, hidden: Tensor) -> Tensor:
        return self._projection(hidden).float()
