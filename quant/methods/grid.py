"""Scales and zero points for groups of weights: the least squared error over a search of clipped ranges.

A group's largest value need not be representable: clipping it gives the others a finer grid. For each group the range
is shrunk step by step, the codes are rounded, and the scale of least error wins; least-squares steps then fit that
scale to the codes that it produced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ..conversions import convert
from ..scheme import WeightOnly

# Smallest fraction of a group's range that is tried, by bits: the fewer levels, the more clipping pays.
SMALLEST_RANGE = {2: 0.4, 3: 0.55, 4: 0.7, 8: 0.975}
STEP = 0.025
NUM_FITS = 2
# Scales are stored in float16; a smaller one would round to zero and lose its group.
SMALLEST_SCALE = 2.0**-24
LARGEST_SCALE = 65504.0
# Errors times their importance.
Weigh = Callable[[Tensor], Tensor]


@dataclass(slots=True)
class GroupGrid:
    """A candidate per group: scale and zero [N, G, 1]."""

    scale: Tensor
    zero: Tensor

    def levels(self, groups: Tensor, top: int) -> Tensor:
        """Codes minus zero, [N, G, group]."""
        return (groups / self.scale).round_().add_(self.zero).clamp_(0, top).sub_(self.zero)

    def take_better(self, other: GroupGrid, error: Tensor, other_error: Tensor) -> Tensor:
        """Adopt ``other`` in the groups where its error is less; returns the errors that remain."""
        better = other_error < error
        self.scale = torch.where(better, other.scale, self.scale)
        self.zero = torch.where(better, other.zero, self.zero)
        return torch.where(better, other_error, error)


def in_groups(weight: Tensor, group_size: int) -> Tensor:
    """``weight`` [N, K] in float32 as [N, G, group].

    A short last group is filled with its own last value, which changes neither its range nor its best scale much.
    """
    padded = weight.float()
    if weight.shape[1] % group_size:
        padded = F.pad(padded.unsqueeze(0), (0, -weight.shape[1] % group_size), mode="replicate").squeeze(0)
    return padded.unflatten(1, (-1, group_size))


def round_to_range(weight: Tensor, scheme: WeightOnly) -> Tensor:
    """``weight`` [N, K] on grids over each group's whole range, dequantized: what a search can afford many times."""
    groups = in_groups(weight, scheme.resolved_group_size(weight.shape[1]))
    top = 2**scheme.bits - 1
    grid = next(_candidates(groups, scheme, top, positive=False))
    return grid.levels(groups, top).mul_(grid.scale).flatten(1)[:, : weight.shape[1]]


def whole_range(groups: Tensor, scheme: WeightOnly) -> GroupGrid:
    """The grid of each group in ``groups`` [N, G, group] that clips nothing, as llm-compressor has it."""
    top = 2**scheme.bits - 1
    if not scheme.symmetric:
        return next(_candidates(groups, scheme, top, positive=True))
    scale = storable_scale(groups.abs().amax(-1, keepdim=True) / (top / 2))
    return GroupGrid(scale, torch.full_like(scale, top // 2 + 1))


def search_grid(
    groups: Tensor,
    scheme: WeightOnly,
    importance: Tensor | None = None,
    *,
    positive: bool = False,
    first: GroupGrid | None = None,
) -> GroupGrid:
    """The grid of each group in ``groups`` [N, G, group].

    ``importance`` weighs the squared errors: [..., G, group] each column, [G, group, group] the products of any two of
    a group's, as second moments of its inputs do (of three dimensions only this is square); None: all alike.
    ``positive``: no negative scales, which point a symmetric grid's longer end the other way. ``first`` is tried before
    all others: no group comes out with a larger error than it has there.
    """
    top = 2**scheme.bits - 1
    if importance is None and first is None and not scheme.symmetric:
        found = convert("search_grids", groups, _fractions(scheme), top, NUM_FITS, positive)
        if found is not None:
            return GroupGrid(found[0], found[1])
    weigh = _weigher(groups, importance)
    candidates = _candidates(groups, scheme, top, positive=positive)
    start = first or next(candidates)
    best, best_error = GroupGrid(start.scale, start.zero), _squared_error(groups, start, top, weigh)
    for candidate in candidates:
        best_error = best.take_better(candidate, best_error, _squared_error(groups, candidate, top, weigh))
    for _ in range(NUM_FITS):
        fitted = _fitted(groups, best, top, weigh)
        if positive:
            fitted = GroupGrid(torch.where(fitted.scale > 0, fitted.scale, best.scale), fitted.zero)
        best_error = best.take_better(fitted, best_error, _squared_error(groups, fitted, top, weigh))
    return best


def _weigher(groups: Tensor, importance: Tensor | None) -> Weigh:
    if importance is None:
        return lambda values: values
    if importance.shape == (groups.shape[1], groups.shape[2], groups.shape[2]):
        return lambda values: (values.transpose(0, 1) @ importance).transpose(0, 1)
    return lambda values: values * importance


def _fractions(scheme: WeightOnly) -> list[float]:
    """Of a group's range, in the order they are tried in."""
    return [1 - index * STEP for index in range(round((1 - SMALLEST_RANGE[scheme.bits]) / STEP) + 1)]


def _candidates(groups: Tensor, scheme: WeightOnly, top: int, *, positive: bool) -> Iterator[GroupGrid]:
    fractions = _fractions(scheme)
    if scheme.symmetric and positive:
        scale = groups.abs().amax(-1, keepdim=True) / (top // 2)
        for fraction in fractions:
            yield GroupGrid(storable_scale(scale * fraction), torch.full_like(scale, top // 2 + 1))
        return
    if scheme.symmetric:
        # The grid reaches one step further below its zero than above: point that end at the largest value, or away.
        middle = 2 ** (scheme.bits - 1)
        scale = groups.gather(-1, groups.abs().argmax(-1, keepdim=True)) / -middle
        zero = torch.full_like(scale, middle)
        for fraction in fractions:
            yield from (GroupGrid(storable_scale(scale * sign * fraction), zero.clone()) for sign in (1.0, -1.0))
        return
    low = groups.amin(-1, keepdim=True).clamp(max=0.0)
    high = groups.amax(-1, keepdim=True).clamp(min=0.0)
    for fraction in fractions:
        scale = storable_scale((high - low) * (fraction / top))
        yield GroupGrid(scale, (-low * fraction / scale).round().clamp(0, top))


def _fitted(groups: Tensor, grid: GroupGrid, top: int, weigh: Weigh) -> GroupGrid:
    """The scale that fits the grid's codes best: a least-squares line through zero."""
    levels = grid.levels(groups, top)
    weighted = weigh(levels)
    power = (weighted * levels).sum(-1, keepdim=True)
    scale = (weighted * groups).sum(-1, keepdim=True) / power.clamp(min=torch.finfo(power.dtype).tiny)
    return GroupGrid(torch.where(power > 0, storable_scale(scale), grid.scale), grid.zero)


def storable_scale(scale: Tensor) -> Tensor:
    """Round to what float16 holds, away from zero and infinity, keeping the sign."""
    magnitude = scale.abs().clamp(SMALLEST_SCALE, LARGEST_SCALE).to(torch.float16).float()
    return torch.where(scale < 0, -magnitude, magnitude)


def _squared_error(groups: Tensor, grid: GroupGrid, top: int, weigh: Weigh) -> Tensor:
    error = grid.levels(groups, top).mul_(grid.scale).sub_(groups)
    return (weigh(error) * error).sum(-1, keepdim=True)
