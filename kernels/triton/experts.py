"""``expert_linear`` in Triton: one entry for every kind of weights that its kernels take.

Sorting the choices, the product and the weighted sum are separate launches without a host synchronization, so a graph
can capture them. No atomics: a row's result depends on its own input and on the launch row of its batch's size, not on
which rows share the batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...quant.canonical import CanonicalWeight
from ...quant.scheme import Dense
from . import expert_dense, expert_packed, expert_scaled
from .expert_sum import sum_experts

PreparedExperts = expert_dense.DenseExperts | expert_packed.PackedExperts | expert_scaled.ScaledExperts


def prepare(weights: Sequence[CanonicalWeight], dtype: torch.dtype) -> PreparedExperts:
    """One canonical weight [N,K] per expert, all of one scheme -> what ``expert_linear`` takes."""
    if isinstance(weights[0].scheme, Dense):
        return expert_dense.prepare(weights, dtype)
    return expert_packed.prepare(weights, dtype)


def expert_linear(
    x: Tensor, experts: PreparedExperts, expert_ids: Tensor, routing_weights: Tensor | None = None
) -> Tensor:
    """``reference.expert_linear``: x [T,K] or [T,k,K] -> [T,k,N], or with ``routing_weights`` [T,k] -> [T,N].

    ``expert_ids`` must not change in place between two products: the second one finds the sorting of the first.
    """
    if isinstance(experts, expert_dense.DenseExperts):
        rows = expert_dense.dense_experts(x, experts, expert_ids)
    elif isinstance(experts, expert_scaled.ScaledExperts):
        rows = expert_scaled.scaled_experts(x, experts, expert_ids)
    else:
        rows = expert_packed.packed_experts(x, experts, expert_ids)
    return rows if routing_weights is None else sum_experts(rows, routing_weights)
