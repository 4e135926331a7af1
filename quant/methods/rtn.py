"""Round to nearest, with the scale of each group chosen for the least squared error.

A group's largest value need not be representable: clipping it gives the others a finer grid. For each group the range
is shrunk step by step, the codes are rounded, and the scale of least error wins; least-squares steps then fit that
scale to the codes that it produced. No data is needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ..canonical import PackedWeight
from ..packing import pack
from ..scheme import WeightOnly
from ..threads import single_threaded_pool

# Smallest fraction of a group's range that is tried, by bits: the fewer levels, the more clipping pays.
SMALLEST_RANGE = {2: 0.4, 3: 0.55, 4: 0.7, 8: 0.975}
STEP = 0.025
NUM_FITS = 2
# Scales are stored in float16; a smaller one would round to zero and lose its group.
SMALLEST_SCALE = 2.0**-24
LARGEST_SCALE = 65504.0
# Weights worked on at once: the temporaries stay in the caches.
CHUNK = 1 << 18


def quantize_rtn(weight: Tensor, scheme: WeightOnly) -> PackedWeight:
    """Quantize ``weight`` [N, K] (finite, any floating-point type); scales come out in float16."""
    rows, columns = weight.shape
    group_size = scheme.resolved_group_size(columns)
    chunks = weight.split(max(1, CHUNK // columns))
    # One torch thread per chunk: a shared thread team for such short operations waits more than it computes.
    with single_threaded_pool() as pool:
        parts = list(pool.map(lambda chunk: _quantize_rows(chunk, scheme, group_size), chunks))
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


@dataclass(slots=True)
class _Grid:
    """A candidate per group: scale and zero [N, G, 1]."""

    scale: Tensor
    zero: Tensor

    def levels(self, groups: Tensor, top: int) -> Tensor:
        """Codes minus zero, [N, G, group]."""
        return (groups / self.scale).round_().add_(self.zero).clamp_(0, top).sub_(self.zero)

    def take_better(self, other: _Grid, error: Tensor, other_error: Tensor) -> Tensor:
        """Adopt ``other`` in the groups where its error is less; returns the errors that remain."""
        better = other_error < error
        self.scale = torch.where(better, other.scale, self.scale)
        self.zero = torch.where(better, other.zero, self.zero)
        return torch.where(better, other_error, error)


def _quantize_rows(weight: Tensor, scheme: WeightOnly, group_size: int) -> _Rows:
    columns = weight.shape[1]
    # A short last group is filled with its own last value, which changes neither its range nor its best scale much.
    padded = weight.float()
    if columns % group_size:
        padded = F.pad(padded.unsqueeze(0), (0, -columns % group_size), mode="replicate").squeeze(0)
    groups = padded.unflatten(1, (-1, group_size))
    top = 2**scheme.bits - 1
    best = _search(groups, scheme, top)
    codes = (best.levels(groups, top) + best.zero).to(torch.uint8)
    return _Rows(codes.flatten(1)[:, :columns], best.scale.squeeze(-1), best.zero.squeeze(-1))


def _search(groups: Tensor, scheme: WeightOnly, top: int) -> _Grid:
    best: _Grid | None = None
    best_error = torch.empty(0)
    for candidate in _candidates(groups, scheme, top):
        error = _squared_error(groups, candidate, top)
        if best is None:
            best, best_error = candidate, error
        else:
            best_error = best.take_better(candidate, best_error, error)
    assert best is not None
    for _ in range(NUM_FITS):
        fitted = _fitted(groups, best, top)
        best_error = best.take_better(fitted, best_error, _squared_error(groups, fitted, top))
    return best


def _candidates(groups: Tensor, scheme: WeightOnly, top: int) -> Iterator[_Grid]:
    fractions = [1 - index * STEP for index in range(round((1 - SMALLEST_RANGE[scheme.bits]) / STEP) + 1)]
    if scheme.symmetric:
        # The grid reaches one step further below its zero than above: point that end at the largest value, or away.
        middle = 2 ** (scheme.bits - 1)
        scale = groups.gather(-1, groups.abs().argmax(-1, keepdim=True)) / -middle
        zero = torch.full_like(scale, middle)
        for fraction in fractions:
            yield from (_Grid(_storable(scale * sign * fraction), zero.clone()) for sign in (1.0, -1.0))
        return
    low = groups.amin(-1, keepdim=True).clamp(max=0.0)
    high = groups.amax(-1, keepdim=True).clamp(min=0.0)
    for fraction in fractions:
        scale = _storable((high - low) * (fraction / top))
        yield _Grid(scale, (-low * fraction / scale).round().clamp(0, top))


def _fitted(groups: Tensor, grid: _Grid, top: int) -> _Grid:
    """The scale that fits the grid's codes best: a least-squares line through zero."""
    levels = grid.levels(groups, top)
    power = (levels * levels).sum(-1, keepdim=True)
    scale = (levels * groups).sum(-1, keepdim=True) / power.clamp(min=1.0)
    return _Grid(torch.where(power > 0, _storable(scale), grid.scale), grid.zero)


def _storable(scale: Tensor) -> Tensor:
    """Round to what float16 holds, away from zero and infinity, keeping the sign."""
    magnitude = scale.abs().clamp(SMALLEST_SCALE, LARGEST_SCALE).to(torch.float16).float()
    return torch.where(scale < 0, -magnitude, magnitude)


def _squared_error(groups: Tensor, grid: _Grid, top: int) -> Tensor:
    return (grid.levels(groups, top).mul_(grid.scale) - groups).square_().sum(-1, keepdim=True)
