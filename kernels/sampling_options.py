"""What the sampling operations read beside the logits: options per row, and edits per (row, token).

Both lie on the host, where requests keep them; a kernel for another device uploads what it reads in one copy.
Legend: R rows of logits, V columns (the vocabulary), M edits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NOT_SEEN = -1
MAX_COLUMNS = 1 << 22  # weights of at most 2^40 then sum up to less than 2^63


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawOptions:
    """Options per row, all [R].

    ``temperature`` 0 takes the most probable token; else at least 1e-5. ``top_k`` 0: no limit. ``top_p`` in (0, 1],
    ``min_p`` in [0, 1]. ``uniform`` in [0, 1) is the row's random number.
    """

    temperature: NDArray[np.float32]
    top_k: NDArray[np.int64]
    top_p: NDArray[np.float32]
    min_p: NDArray[np.float32]
    uniform: NDArray[np.float64]

    def limits(self, num_columns: int) -> NDArray[np.int64]:
        """``top_k`` where it leaves anything out of V columns, else 0."""
        return np.where(self.top_k < num_columns, self.top_k, 0)

    def has_filters(self, num_columns: int) -> bool:
        """Whether any row may lose tokens to top_k, top_p or min_p."""
        return bool(self.limits(num_columns).any() or (self.top_p < 1.0).any() or self.min_p.any())


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitEdits:
    """Changes of single logits; every (``rows``, ``tokens``) pair, both int64 [M], occurs once.

    ``counts`` int32 [M]: how often the token is in the row's output; 0: only in the prompt; ``NOT_SEEN``: in neither,
    so that no penalty applies. ``bias`` float32 [M]; minus infinity bans. The penalties are float32 [R].
    """

    rows: NDArray[np.int64]
    tokens: NDArray[np.int64]
    counts: NDArray[np.int32]
    bias: NDArray[np.float32]
    repetition_penalty: NDArray[np.float32]
    presence_penalty: NDArray[np.float32]
    frequency_penalty: NDArray[np.float32]
