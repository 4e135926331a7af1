"""Pooler: one vector of a prompt's hidden states, chunk by chunk."""

from __future__ import annotations

import math

import torch
from torch import Tensor

POOLINGS = ("last", "mean", "cls")


class Pooler:
    """``kind``: last token's hidden state, the first one's (cls), or the mean of all."""

    def __init__(self, kind: str, num_tokens: int) -> None:
        self._kind = kind
        self._num_tokens = num_tokens
        self._vector: Tensor | None = None

    @property
    def needs_every_token(self) -> bool:
        """True where tokens from the prefix cache, whose hidden states are not kept, will not do."""
        return self._kind != "last"

    def add(self, hidden: Tensor, first: int) -> None:
        """Take in ``hidden`` [T,K] of the tokens from ``first`` on; from 0 it begins anew."""
        if self._kind == "mean":
            total = hidden.float().sum(dim=0)
            self._vector = total if first == 0 or self._vector is None else self._vector + total
        elif self._kind == "last":
            self._vector = hidden[-1].float()
        elif first == 0:
            self._vector = hidden[0].float()

    def result(self) -> bytes | None:
        """float32 [K], little-endian; None where it is not finite."""
        assert self._vector is not None
        vector = self._vector / self._num_tokens if self._kind == "mean" else self._vector
        if not math.isfinite(float(vector.abs().max())):
            return None
        return vector.to("cpu", torch.float32).numpy().astype("<f4").tobytes()
