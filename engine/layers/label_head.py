"""LabelHead: a classifier in place of a language model's head."""

from __future__ import annotations

from torch import Tensor


class LabelHead:
    """hidden [R,K] -> one number per label, float32 [R,L]; ``weight`` is [L,K], and few rows need no kernel."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight.float()

    def __call__(self, hidden: Tensor) -> Tensor:
        return hidden.float() @ self._weight.T
