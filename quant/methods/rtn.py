"""Round to nearest, the scale of each group chosen for the least squared error (``grid.py``). No data is needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..canonical import PackedWeight
from ..packing import pack
from ..scheme import WeightOnly
from ..threads import single_threaded_pool
from .grid import GroupGrid, in_groups, search_grid, whole_range

# Weights worked on at once: the temporaries stay in the caches.
CHUNK = 1 << 18


def quantize_rtn(
    weight: Tensor,
    scheme: WeightOnly,
    *,
    positive: bool = False,
    importance: Tensor | None = None,
    clips: bool = True,
) -> PackedWeight:
    """Quantize ``weight`` [N, K] (finite, any floating-point type); scales come out in float16.

    ``positive``: none of them negative. ``importance`` [K] weighs the squared errors of the columns. Without ``clips``
    nothing is searched: scales come from the groups' largest and smallest values.
    """
    rows, columns = weight.shape
    group_size = scheme.resolved_group_size(columns)
    weights = None if importance is None else in_groups(importance[None], group_size)[0]

    def find(groups: Tensor) -> GroupGrid:
        return search_grid(groups, scheme, weights, positive=positive) if clips else whole_range(groups, scheme)

    chunks = weight.split(max(1, CHUNK // columns))
    # One torch thread per chunk: a shared thread team for such short operations waits more than it computes.
    with single_threaded_pool() as pool:
        parts = list(pool.map(lambda chunk: _quantize_rows(chunk, scheme, find, group_size), chunks))
    codes = torch.cat([part.codes for part in parts])
    return PackedWeight(
        scheme=WeightOnly(scheme.bits, -1 if group_size >= columns else group_size, scheme.symmetric),
        shape=(rows, columns),
        qweight=pack(codes, scheme.bits),
        scales=torch.cat([part.scales for part in parts]).to(torch.float16),
        zeros=None if scheme.symmetric else torch.cat([part.zeros for part in parts]).to(torch.uint8),
    )


@dataclass(slots=True)
class _Rows:
    codes: Tensor
    scales: Tensor
    zeros: Tensor


def _quantize_rows(weight: Tensor, scheme: WeightOnly, find: Callable[[Tensor], GroupGrid], group_size: int) -> _Rows:
    columns = weight.shape[1]
    groups = in_groups(weight, group_size)
    top = 2**scheme.bits - 1
    best = find(groups)
    codes = (best.levels(groups, top) + best.zero).to(torch.uint8)
    return _Rows(codes.flatten(1)[:, :columns], best.scale.squeeze(-1), best.zero.squeeze(-1))
