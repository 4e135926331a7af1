"""Groups of input features: from any assignment to runs of neighbours."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def contiguous_groups(index: Tensor, num_groups: int) -> tuple[int, Tensor | None, Tensor | None]:
    """Resolve any g_idx [K] into equal runs: (group size, gather [K] or None, stored group of each run or None).

    Features are sorted by group. Where the groups have unequal sizes the run is their greatest common divisor and the
    runs of one group share its scale.
    """
    columns = index.numel()
    order = torch.sort(index, stable=True).indices
    counts = torch.bincount(index)
    size = _run_length(counts[counts > 0].tolist())
    identity = bool((order == torch.arange(columns)).all())
    group_of_run = index[order][::size]
    trivial = bool(torch.equal(group_of_run, torch.arange(num_groups)))
    return size, None if identity else order.to(torch.int32), None if trivial else group_of_run


def _run_length(sizes: list[int]) -> int:
    """The longest run that tiles groups of these sizes; only the last run may be short."""
    *full, last = sizes
    if not full:
        return last
    size = math.gcd(*full)
    return size if last <= size or last % size == 0 else math.gcd(size, last)
