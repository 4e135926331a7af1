"""OutputRows: the rows of a step whose hidden states are read."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ...kernels.attention_batch import AttentionBatch


@dataclass(frozen=True, slots=True, eq=False)
class OutputRows:
    """Rows of a step's T tokens; of all others the last layer leaves keys and values alone behind.

    ``index``  int64 [R], device, R from 0 up: ascending, and of each request one run of neighbours.
    ``batch``  the requests that have such rows, with those rows as their queries; ``slot_mapping`` is theirs as well.
    """

    index: Tensor
    batch: AttentionBatch
