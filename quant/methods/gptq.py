"""GPTQ (arXiv:2210.17323): round column by column, and let the columns still to come make up for each error.

Against the published algorithm: groups take their scales from weights that every error so far has reached, searched
with the weight that each column has in the loss; columns may be ordered by importance without splitting a group
(``order="group"``), so that the result needs no gather; and the target may be the output of the original model rather
than of the layer on its quantized inputs (``correction``; the objective of arXiv:2504.02692, solved for the target).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..canonical import PackedWeight, dequantize
from ..conversions import convert
from ..packing import pack
from ..scheme import WeightOnly
from ..threads import over_rows
from .grid import GroupGrid, round_to_range, search_grid
from .refine import Codes, refine
from .rtn import quantize_rtn
from .shrinkage import shrunk
from .statistics import InputStatistics

DAMPINGS = 6
# Columns that are rounded before the rest of the matrix makes up for them.
BLOCK = 32
# A result that reproduces the outputs worse than rounding to nearest by more than this is not kept.
WORST_AGAINST_RTN = 1.05
LIKELY_AGAINST_RANGE = 0.7
# Output features that the comparison and the error look at, spread over all.
COMPARED_ROWS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTQOptions:
    """How to round.

    ``order``       of the columns: ``none`` as they are; ``group`` whole groups by importance and columns within each;
                    ``static`` columns by importance, scales fixed before; ``full`` columns by importance and groups cut
                    in that order (act-order with a gather).
    ``damping``     fraction of the mean of the Hessian's diagonal, raised tenfold while it is singular. Products of
                    different features are shrunk as well, the more the fewer tokens there were.
    ``correction``  0 to 1: how far the target moves towards the original model's output. All the way follows the noise
                    of few calibration tokens too: with 4096 of them, 6 layers of SmolLM2 at 4 bits strayed by 0.105 of
                    their held-out hidden states at 0, 0.097 at 0.5 and 0.110 at 1.
    ``passes``      of coordinate descent over the codes after all are rounded, scales refitted before and after each.
    ``positive``    no negative scales.
    """

    order: str = "group"
    damping: float = 0.05
    correction: float = 0.5
    passes: int = 1
    positive: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTQResult:
    """``error`` is ||(T - Q) X|| / ||T X|| for the target T and the inputs X, of at most some rows of a large matrix;
    ``damping`` as it was used.

    ``fallback`` says why the weight was rounded to nearest instead.
    """

    weight: PackedWeight
    error: float
    damping: float
    fallback: str | None = None


def quantize_gptq(
    weight: Tensor, statistics: InputStatistics, scheme: WeightOnly, options: GPTQOptions | None = None
) -> GPTQResult:
    """Quantize ``weight`` [N, K] for the inputs in ``statistics``.

    ValueError when the Hessian is not finite. A Hessian of zeros, or one that stays singular, gives round to nearest.
    """
    options = options or GPTQOptions()
    hessian = statistics.hessian
    if not bool(hessian.isfinite().all()):
        raise ValueError("the calibration inputs hold NaN or infinity")
    if not bool(hessian.any()):
        return _to_nearest(weight, scheme, options, hessian, "no calibration token reached it")
    moments = shrunk(hessian, statistics.num_tokens)
    for damping in _dampings(options.damping, hessian):
        damped = _damped(moments, damping)
        columns = _order(hessian.diagonal(), scheme, options.order)
        factor = _cholesky(damped[columns][:, columns])
        if factor is None:
            continue
        target = _target(weight, statistics, _damped(hessian, damping), options.correction)
        packed = _rounded(target, hessian, damped, columns, factor, scheme, options)
        if packed is not None:
            error, worse = _judged(packed, target, hessian, scheme, options)
            if worse is None:
                return GPTQResult(weight=packed, error=error, damping=damping)
            return _to_nearest(weight, scheme, options, hessian, worse)
    return _to_nearest(weight, scheme, options, hessian, "its Hessian stayed singular")


def _to_nearest(weight: Tensor, scheme: WeightOnly, options: GPTQOptions, hessian: Tensor, reason: str) -> GPTQResult:
    rounded = quantize_rtn(weight, scheme, positive=options.positive)
    error = output_error(weight, rounded, hessian) if bool(hessian.any()) else math.nan
    return GPTQResult(weight=rounded, error=error, damping=0.0, fallback=reason)


def _judged(
    packed: PackedWeight, target: Tensor, hessian: Tensor, scheme: WeightOnly, options: GPTQOptions
) -> tuple[float, str | None]:
    """A result's output error and why it is not kept, both from some of its rows.

    Rounding to nearest with searched scales is tried only where it could come near: scales of whole ranges cost less.
    """
    rows = slice(0, None, -(-len(target) // COMPARED_ROWS))
    wanted = target[rows]
    error = _relative_error(dequantize(packed)[rows] - wanted, wanted, hessian)
    if error <= LIKELY_AGAINST_RANGE * _relative_error(round_to_range(wanted, scheme) - wanted, wanted, hessian):
        return error, None
    plain = output_error(wanted, quantize_rtn(wanted, scheme, positive=options.positive), hessian)
    worse = error > WORST_AGAINST_RTN * plain
    return error, f"its error {error:.4f} would be above {plain:.4f}" if worse else None


def output_error(weight: Tensor, quantized: PackedWeight, hessian: Tensor) -> float:
    """||(W - Q) X|| / ||W X|| from the Hessian [K, K] of the inputs."""
    return _relative_error(dequantize(quantized).to(hessian) - weight.to(hessian.dtype), weight, hessian)


def _relative_error(missed: Tensor, weight: Tensor, hessian: Tensor) -> float:
    wanted = _power(weight.to(hessian.dtype), hessian)
    return math.sqrt(max(_power(missed, hessian), 0.0) / max(wanted, 1e-300))


def _power(matrix: Tensor, hessian: Tensor) -> float:
    return float(((matrix @ hessian) * matrix).sum())


def _dampings(first: float, hessian: Tensor) -> list[float]:
    """Amounts for the diagonal, rising."""
    mean = float(hessian.diagonal().mean())
    return [max(first, 1e-6 if step else 0.0) * 10.0**step * mean for step in range(DAMPINGS)]


def _damped(hessian: Tensor, damping: float) -> Tensor:
    """A dead column, whose input is always zero, gets a place of its own: nothing else depends on it."""
    damped = hessian.clone()
    damped.diagonal().add_(damping)
    damped.diagonal()[hessian.diagonal() <= 0] = 1.0
    return damped


def _target(weight: Tensor, statistics: InputStatistics, damped: Tensor, correction: float) -> Tensor:
    """The weight W + c W D H^-1, for the deviation D and the ``damped`` Hessian H.

    Its outputs on the quantized model's inputs are closest to the original model's outputs.
    """
    target = weight.to(damped.dtype)
    deviation = statistics.deviation if correction else None
    factor = None if deviation is None else _cholesky(damped)
    if deviation is None or factor is None:
        return target
    missing = target @ deviation.to(factor)
    return target.add(torch.cholesky_solve(missing.T, factor).T, alpha=correction)


def _rounded(
    target: Tensor,
    hessian: Tensor,
    damped: Tensor,
    columns: Tensor,
    factor: Tensor,
    scheme: WeightOnly,
    options: GPTQOptions,
) -> PackedWeight | None:
    """None where the inverse has no Cholesky factor, or the result is not finite.

    ``columns`` in their rounding order, ``factor`` of ``damped`` in that order.
    """
    dead = hessian.diagonal() <= 0
    spread = _inverse_factor(factor)
    if spread is None:
        return None
    grids = _static_grids(target, scheme, dead, positive=options.positive) if options.order == "static" else None
    sweep = _Sweep(target.T[columns].float().contiguous(), spread.float(), scheme, columns, dead[columns], grids)
    sweep.positive = options.positive
    sweep.run()
    is_cut = options.order == "full" and scheme.group_size != -1
    place = columns if is_cut else torch.arange(len(columns), device=columns.device)
    codes = sweep.codes(in_order=is_cut)
    if options.passes:
        moments = damped.clone()
        moments.diagonal()[dead] = 0.0
        moments = moments[place][:, place]
        refine(codes, target.T[place].float(), moments, passes=options.passes, positive=options.positive)
    packed = _packed(codes, scheme, place.to(torch.int32) if is_cut else None)
    return packed if bool(packed.scales.isfinite().all()) else None


def _cholesky(matrix: Tensor) -> Tensor | None:
    factor, info = torch.linalg.cholesky_ex(matrix)
    return None if int(info) else factor


def _inverse_factor(factor: Tensor) -> Tensor | None:
    """U upper triangular with U^T U = H^-1 from H's Cholesky factor: row i says how column i's error spreads over
    later columns."""
    upper, info = torch.linalg.cholesky_ex(torch.cholesky_inverse(factor), upper=True)
    return None if int(info) or not bool(upper.isfinite().all()) else upper


def inverse_diagonal(hessian: Tensor, damping: float) -> Tensor:
    """[K]: what a column's squared rounding error adds to the outputs' when later columns make up for what they can.

    Columns go by importance, as with ``order="static"``.
    """
    for amount in _dampings(damping, hessian):
        columns = hessian.diagonal().argsort(descending=True, stable=True)
        factor = _cholesky(_damped(hessian, amount)[columns][:, columns])
        spread = None if factor is None else _inverse_factor(factor)
        if spread is not None:
            weights = torch.empty_like(hessian.diagonal())
            weights[columns] = spread.diagonal().square().reciprocal()
            return weights
    return hessian.diagonal()


def _order(importance: Tensor, scheme: WeightOnly, order: str) -> Tensor:
    """The columns in the order they are rounded in."""
    count = importance.shape[0]
    if order == "none":
        return torch.arange(count, device=importance.device)
    by_importance = importance.argsort(descending=True, stable=True)
    if order in ("full", "static"):
        return by_importance
    size = scheme.resolved_group_size(count)
    groups = torch.arange(count, device=importance.device) // size
    num_groups = scheme.num_groups(count)
    totals = torch.zeros(num_groups, dtype=importance.dtype, device=importance.device).index_add_(0, groups, importance)
    lengths = torch.bincount(groups, minlength=num_groups)
    means = totals / lengths
    if count % size:
        means[-1] = -1.0  # A short group stays last: the others start at multiples of their size.
    rank = means.argsort(descending=True, stable=True).argsort()
    return by_importance[rank[groups[by_importance]].argsort(stable=True)]


def _static_grids(target: Tensor, scheme: WeightOnly, dead: Tensor, *, positive: bool) -> GroupGrid:
    """Grids of all groups before any column is rounded, [N, G, 1]."""
    size = scheme.resolved_group_size(target.shape[1])
    alive = target.float().masked_fill(dead, 0.0)
    padded = torch.nn.functional.pad(alive, (0, -alive.shape[1] % size)).unflatten(1, (-1, size))
    grids = over_rows(lambda rows: search_grid(padded[rows], scheme, positive=positive), len(target), target.shape[1])
    return GroupGrid(torch.cat([grid.scale for grid in grids]), torch.cat([grid.zero for grid in grids]))


class _Sweep:
    """One pass over the columns of ``weight`` [K, N], in rounding order; ``factor`` is the inverse's [K, K]."""

    def __init__(
        self,
        weight: Tensor,
        factor: Tensor,
        scheme: WeightOnly,
        columns: Tensor,
        dead: Tensor,
        grids: GroupGrid | None,
    ) -> None:
        self._weight = weight
        self._factor = factor
        self._scheme = scheme
        self._columns = columns
        self._dead = dead
        self._static = grids
        self.positive = False
        self._size = scheme.resolved_group_size(weight.shape[0])
        num_groups = scheme.num_groups(weight.shape[0])
        shape = (num_groups, weight.shape[1])
        self._scales = torch.empty(shape, device=weight.device)
        self._zeros = torch.empty(shape, device=weight.device)
        self._codes = torch.empty_like(weight)
        # Of each column in rounding order: the group whose grid it is rounded on.
        self._group_numbers = self._group_of_column()
        self._groups = self._group_numbers.tolist()
        self._top = 2**scheme.bits - 1

    def _group_of_column(self) -> Tensor:
        if self._static is not None:
            return self._columns // self._size
        return torch.arange(len(self._columns), device=self._columns.device) // self._size

    def run(self) -> None:
        """Round every column."""
        if self._static is not None:
            self._scales, self._zeros = (
                part[..., 0].T.contiguous() for part in (self._static.scale, self._static.zero)
            )
        count = len(self._columns)
        block = BLOCK if self._size >= count or self._size % BLOCK == 0 else self._size * -(-BLOCK // self._size)
        if self._static is None and self._size >= count:
            self._find_grid(0, count)
        for start in range(0, count, block):
            self._block(start, min(start + block, count))

    def _block(self, start: int, end: int) -> None:
        has_grids = self._static is not None or self._size >= len(self._columns)
        if not has_grids and end - start <= self._size:
            if start % self._size == 0:
                self._find_grid(start, min(start + self._size, len(self._columns)))
            has_grids = True
        errors = self._compiled_errors(start, end) if has_grids else None
        if errors is None:
            errors = self._errors(start, end, has_grids=has_grids)
        self._weight[end:].addmm_(self._factor[start:end, end:].T, errors, alpha=-1)

    def _compiled_errors(self, start: int, end: int) -> Tensor | None:
        return convert(
            "gptq_round", self._weight, self._factor, (start, end), self._scales, self._zeros, self._group_numbers,
            self._top, self._codes,
        )  # fmt: skip

    def _errors(self, start: int, end: int, *, has_grids: bool) -> Tensor:
        """Round the columns of a block, each making up for the errors of those before it; their errors."""
        errors = torch.empty_like(self._weight[start:end])
        for column in range(start, end):
            if not has_grids and column % self._size == 0:
                self._find_grid(column, min(column + self._size, len(self._columns)))
            error = self._round(column)
            errors[column - start] = error
            self._weight[column + 1 : end].addr_(self._factor[column, column + 1 : end], error, alpha=-1)
        return errors

    def _round(self, column: int) -> Tensor:
        """Fix the codes of one column; returns its error [N] in units of its factor."""
        group = self._groups[column]
        scale, zero = self._scales[group], self._zeros[group]
        values = self._weight[column]
        codes = torch.div(values, scale).round_().add_(zero).clamp_(0, self._top)
        self._codes[column] = codes
        return codes.sub_(zero).mul_(scale).neg_().add_(values).div_(self._factor[column, column])

    def _find_grid(self, start: int, end: int) -> None:
        """The grid of the group [start, end) from its weights as they are now; dead columns have no say."""
        values = self._weight[start:end].T.masked_fill(self._dead[start:end], 0.0)
        importance = self._factor.diagonal()[start:end].square().reciprocal()
        importance = (importance / importance.mean()).masked_fill(self._dead[start:end], 0.0)
        grid = search_grid(values[:, None], self._scheme, importance, positive=self.positive)
        self._scales[start // self._size], self._zeros[start // self._size] = grid.scale[:, 0, 0], grid.zero[:, 0, 0]

    def codes(self, *, in_order: bool) -> Codes:
        """The outcome, columns ``in_order`` of rounding or as they were."""
        scales, zeros, codes = self._scales, self._zeros, self._codes
        if not in_order:
            codes = torch.empty_like(codes)
            codes[self._columns] = self._codes
            if self._static is None:
                # Rounding order keeps groups whole: its g-th group is this one of the matrix.
                place = self._columns[:: self._size] // self._size
                scales, zeros = torch.empty_like(scales), torch.empty_like(zeros)
                scales[place], zeros[place] = self._scales, self._zeros
        return Codes(codes, scales, zeros, min(self._size, len(codes)), self._top)


def _packed(codes: Codes, scheme: WeightOnly, perm: Tensor | None) -> PackedWeight:
    count, rows = codes.codes.shape
    group_size = -1 if codes.group_size >= count else codes.group_size
    return PackedWeight(
        scheme=WeightOnly(scheme.bits, group_size, scheme.symmetric, act_order=perm is not None),
        shape=(rows, count),
        qweight=pack(codes.codes.T.to(torch.uint8).contiguous(), scheme.bits),
        scales=codes.scales.T.to(torch.float16).contiguous(),
        zeros=None if scheme.symmetric else codes.zeros.T.to(torch.uint8).contiguous(),
        perm=perm,
    )
