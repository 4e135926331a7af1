"""Making rounded weights better against the second moments of their inputs: scales refitted, codes moved one by one.

Both lower tr((Q - T) H (Q - T)^T), the squared error of the outputs, and never raise it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..conversions import convert
from ..threads import over_rows
from .grid import storable_scale

# Columns whose codes are moved before the rest of the matrix hears of it.
BLOCK = 32
RIDGE = 1e-6
# Elements of a part whose scales are fitted at once: products of few features are slow.
AT_ONCE = 1 << 19


@dataclass(slots=True)
class Codes:
    """A rounded weight, input features first: ``codes`` [K, N], ``scales`` and ``zeros`` [G, N], all float32.

    Groups are runs of ``group_size`` columns; ``top`` is the largest code.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    group_size: int
    top: int

    def levels(self) -> Tensor:
        """Codes minus their zeros, [K, N]."""
        return self.codes - self._spread(self.zeros)

    def values(self) -> Tensor:
        """What the codes stand for, [K, N]."""
        return self.levels().mul_(self._spread(self.scales))

    def _spread(self, values: Tensor) -> Tensor:
        if len(values) == 1:
            return values
        return values.repeat_interleave(self.group_size, dim=0)[: len(self.codes)]


def refine(rounded: Codes, target: Tensor, hessian: Tensor, *, passes: int = 1, positive: bool = False) -> None:
    """Improve ``rounded`` in place towards ``target`` [K, N] for inputs with second moments ``hessian`` [K, K]."""
    wanted = hessian @ target
    _refit_scales(rounded, wanted, hessian, positive=positive)
    for _ in range(passes):
        _move_codes(rounded, target, hessian)
        _refit_scales(rounded, wanted, hessian, positive=positive)


def _refit_scales(rounded: Codes, wanted: Tensor, hessian: Tensor, *, positive: bool) -> None:
    """The scales that are best for the codes: one small least-squares problem per output feature."""
    levels = rounded.levels()

    def scales_of(rows: slice) -> Tensor:
        return _best_scales(rounded.scales.T[rows], levels[:, rows], wanted[:, rows], hessian, rounded, positive)

    rounded.scales = torch.cat(over_rows(scales_of, levels.shape[1], len(levels), at_once=AT_ONCE)).T.contiguous()


def _best_scales(
    old: Tensor, levels: Tensor, wanted: Tensor, hessian: Tensor, rounded: Codes, positive: bool
) -> Tensor:
    """The better of ``old`` [N, G] and the solutions, for some output features."""
    power, cross = _normal_equations(levels.contiguous(), wanted, hessian, rounded.group_size)
    ridge = power.diagonal(dim1=1, dim2=2).mean(1, keepdim=True) * RIDGE + torch.finfo(power.dtype).tiny
    system = power + torch.diag_embed(ridge.expand(-1, power.shape[1]))
    solved, info = torch.linalg.solve_ex(system, cross + ridge * old)
    usable = (info == 0)[:, None] & solved.isfinite().all(1, keepdim=True)
    if positive:
        usable = usable & (solved > 0).all(1, keepdim=True)
    new = torch.where(usable, storable_scale(solved), old)
    better = _row_errors(new, power, cross) < _row_errors(old, power, cross)
    return torch.where(better[:, None], new, old)


def _normal_equations(levels: Tensor, wanted: Tensor, hessian: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """For scales s of a row, the error is s A s - 2 s b + const: A [N, G, G] and b [N, G]."""
    cross = _group_sums(levels * wanted, size).T
    upper = levels.new_zeros(cross.shape[1], cross.shape[1], levels.shape[1])
    for g, i in enumerate(range(0, len(levels), size)):
        spread = hessian[i:, i : i + size] @ levels[i : i + size]
        upper[g, g:] = _group_sums(spread.mul_(levels[i:]), size)
    power = upper.permute(2, 0, 1).contiguous()
    return power + power.triu(1).mT, cross


def _group_sums(values: Tensor, size: int) -> Tensor:
    """Of values [K, N] of columns the sums over each group, [G, N]."""
    whole = len(values) // size * size
    sums = values[:whole].unflatten(0, (-1, size)).sum(1) if whole else values.new_empty(0, values.shape[1])
    return sums if whole == len(values) else torch.cat([sums, values[whole:].sum(0, keepdim=True)])


def _row_errors(scales: Tensor, power: Tensor, cross: Tensor) -> Tensor:
    quadratic = (scales[:, None] @ power @ scales[:, :, None])[:, 0, 0]
    return quadratic - 2 * (scales * cross).sum(1)


def _move_codes(rounded: Codes, target: Tensor, hessian: Tensor) -> None:
    """One pass of coordinate descent: each code becomes the best one, given all others."""
    values = rounded.values()
    gradient = hessian @ (values - target)
    steps = [-1 / power for power in hessian.diagonal().clamp(min=1e-30).tolist()]
    step_of, groups = torch.tensor(steps), torch.arange(len(values)) // rounded.group_size
    for start in range(0, len(values), BLOCK):
        end = min(start + BLOCK, len(values))
        moved = convert(
            "gptq_move", values, gradient, hessian, step_of, (start, end), rounded.scales, rounded.zeros, groups,
            rounded.top, rounded.codes,
        )  # fmt: skip
        if moved is None:
            moved = _moved(rounded, values, gradient, hessian, steps, range(start, end))
        gradient[end:].addmm_(hessian[end:, start:end], moved)


def _moved(
    rounded: Codes, values: Tensor, gradient: Tensor, hessian: Tensor, steps: list[float], block: range
) -> Tensor:
    """Move the codes of a block of columns; how much their values changed, [columns, N]."""
    moved = torch.zeros_like(values[block.start : block.stop])
    for column in block:
        group = column // rounded.group_size
        scale, zero = rounded.scales[group], rounded.zeros[group]
        best = torch.add(values[column], gradient[column], alpha=steps[column])
        codes = best.div_(scale).round_().add_(zero).clamp_(0, rounded.top)
        rounded.codes[column] = codes
        change = codes.sub_(zero).mul_(scale).sub_(values[column])
        moved[column - block.start] = change
        gradient[column + 1 : block.stop].addr_(hessian[column, column + 1 : block.stop], change)
    return moved
