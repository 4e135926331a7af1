"""RowEdits: the tokens of one row whose logits are changed before a draw, kept up to date token by token."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from ...kernels.sampling_options import NOT_SEEN
from ..sampling_params import SamplingParams

BANNED = -100.0
_MIN_CAPACITY = 64


class RowEdits:
    """Each token once, with its count in the output, its bias, and whether it waits for ``min_tokens``.

    Made where a sample takes its row; a drawn token then costs one look-up, not a walk over the row's tokens.
    """

    def __init__(
        self, params: SamplingParams, prompt: Iterable[int], output: Iterable[int], stop_ids: Iterable[int]
    ) -> None:
        self._places: dict[int, int] = {}
        self._tokens = np.zeros(_MIN_CAPACITY, dtype=np.int64)
        self._counts = np.zeros(_MIN_CAPACITY, dtype=np.int32)
        self._bias = np.zeros(_MIN_CAPACITY, dtype=np.float32)
        self._counting = params.has_penalties
        for token, value in params.logit_bias.items():
            place = self._place(token)  # First: it may replace the arrays by larger ones.
            self._bias[place] = value if value > BANNED else -np.inf
        self._stops = np.array([self._place(token) for token in sorted(stop_ids)], dtype=np.int64)
        if self._counting:
            for token in dict.fromkeys(prompt):
                place = self._place(token)
                self._counts[place] = max(self._counts[place], 0)
            for token in output:
                self.append(token)

    def append(self, token: int) -> None:
        """Count a drawn token."""
        if self._counting:
            place = self._place(token)
            self._counts[place] = max(self._counts[place], 0) + 1

    def entries(self, *, ban_stops: bool) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.float32]]:
        """Tokens, counts and biases; ``ban_stops`` while fewer than ``min_tokens`` tokens have been drawn."""
        size = len(self._places)
        bias = self._bias[:size]
        if ban_stops and len(self._stops):
            bias = bias.copy()
            bias[self._stops] = -np.inf
        return self._tokens[:size], self._counts[:size], bias

    def _place(self, token: int) -> int:
        place = self._places.get(token)
        if place is None:
            place = self._places[token] = len(self._places)
            if place == len(self._tokens):
                self._tokens, self._counts, self._bias = (
                    np.concatenate([part, part]) for part in (self._tokens, self._counts, self._bias)
                )
            self._tokens[place], self._counts[place], self._bias[place] = token, NOT_SEEN, 0.0
        return place
