"""Pooler: one vector of a prompt's hidden states, chunk by chunk."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

POOLINGS = ("last", "mean", "cls", "score")


class Pooler:
    """``kind``: last token's hidden state, also under the name score, the first one's (cls), or the mean of all."""

    def __init__(self, kind: str, num_tokens: int) -> None:
        self._kind = kind
        self._num_tokens = num_tokens
        self._vector: Tensor | None = None

    @property
    def needs_every_token(self) -> bool:
        """True where tokens from the prefix cache, whose hidden states are not kept, will not do."""
        return self._kind not in ("last", "score")

    def rows(self, computed: int, count: int) -> tuple[int, int]:
        """Of ``count`` tokens behind ``computed`` ones: the first whose hidden state is read, and how many are."""
        if self._kind == "mean":
            return 0, count
        if self._kind == "cls":
            return 0, int(computed == 0)
        return count - 1, int(computed + count == self._num_tokens)

    def add(self, hidden: Tensor, first: int) -> None:
        """Take in ``hidden`` [R,K] of the ``rows`` of the tokens from ``first`` on; from 0 it begins anew."""
        if self._kind == "mean":
            self._vector = _added(hidden, None if first == 0 else self._vector)
        elif self._kind in ("last", "score"):
            self._vector = hidden[-1].float()
        elif first == 0:
            self._vector = hidden[0].float()

    def result(self, head: Callable[[Tensor], Tensor] | None = None) -> bytes | None:
        """float32 [K], little-endian, or what ``head`` makes of it; None where that is not finite."""
        assert self._vector is not None
        vector = self._vector / self._num_tokens if self._kind == "mean" else self._vector
        if head is not None:
            vector = head(vector)
        if not math.isfinite(float(vector.abs().max())):
            return None
        return vector.to("cpu", torch.float32).numpy().astype("<f4").tobytes()


def _added(rows: Tensor, before: Tensor | None) -> Tensor:
    """The sum of ``rows`` [R,K] behind ``before`` [K] in float64, row by row: cuts in a prompt change no bit."""
    total = np.zeros(rows.shape[1]) if before is None else before.numpy()
    for row in rows.to("cpu", torch.float32).numpy():
        total += row
    return torch.from_numpy(total)
