"""AWQ (arXiv:2306.00978): input features with large activations get finer steps, then ranges are clipped.

A feature's column is multiplied before rounding and its input divided, which the op before takes over (``folds.py``).
Scales are powers of the mean magnitude of the inputs, with or without that of the weights; the one whose rounded
weights leave the block's output closest wins. Clipping is searched per group on the error of its share of the output.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..canonical import PackedWeight
from ..packing import pack
from ..scheme import Scheme, WeightOnly
from .grid import in_groups, round_to_range, search_grid
from .layer_method import LayerWeights
from .rtn import quantize_rtn
from .scaling import FoldSample
from .statistics import InputStatistics

# Exponents tried first, and the steps around the best of them after.
COARSE = (0.2, 0.4, 0.6, 0.8, 1.0)
FINE = (0.1, 0.05)
SMALLEST = 1e-4


def search_scale(sample: FoldSample) -> Tensor | None:
    """The scale of a fold's inputs for integer weights; None where leaving them alone is best. A `FindScale`."""
    inputs = sample.inputs.abs().mean(0)
    weights = _relative_columns(sample)
    expected = sample.output()
    best_error, best = _error(sample, torch.ones_like(inputs), expected), (0.0, 0.0)
    tried = {(0.0, 0.0)}

    def attempt(power: float, other: float) -> None:
        nonlocal best_error, best
        choice = (round(power, 3), round(other, 3))
        if choice in tried or not 0.0 <= power <= 1.0:
            return
        tried.add(choice)
        error = _error(sample, _scale(sample, inputs, weights, choice), expected)
        if error < best_error:
            best_error, best = error, choice

    for power in COARSE:
        attempt(power, 0.0)
        attempt(power, 1 - power)
    for step in FINE:
        power, other = best
        for moved in (power - step, power + step):
            attempt(moved, 1 - moved if other else 0.0)
    return None if best == (0.0, 0.0) else _scale(sample, inputs, weights, best)


def _relative_columns(sample: FoldSample) -> Tensor:
    """Mean over the rows of each weight over the largest of its group, [K]."""
    sums, num_rows = torch.zeros(sample.inputs.shape[1]), 0
    for name, weight in sample.weights.items():
        scheme = sample.schemes[name]
        assert isinstance(scheme, WeightOnly), f"AWQ is for integer weights, not {scheme}"
        groups = in_groups(weight.abs(), scheme.resolved_group_size(weight.shape[1]))
        relative = groups / groups.amax(-1, keepdim=True).clamp(min=1e-12)
        sums = sums.to(weight) + relative.flatten(1)[:, : weight.shape[1]].sum(0)
        num_rows += weight.shape[0]
    return sums / num_rows


def _scale(sample: FoldSample, inputs: Tensor, weights: Tensor, powers: tuple[float, float]) -> Tensor:
    scale = inputs.clamp(min=SMALLEST) ** powers[0] / weights.clamp(min=SMALLEST) ** powers[1]
    scale = sample.fold.shared(scale.clamp(min=SMALLEST))
    return scale / (scale.max() * scale.min()).sqrt()


def _error(sample: FoldSample, scale: Tensor, expected: Tensor) -> float:
    rounded = {}
    for name, weight in sample.weights.items():
        scheme = sample.schemes[name]
        assert isinstance(scheme, WeightOnly), f"AWQ is for integer weights, not {scheme}"
        rounded[name] = round_to_range(weight * scale, scheme).div_(scale)
    return float((sample.output(rounded) - expected).square().mean())


class ClippedGroups:
    """A `GroupQuantizer`: nearest rounding, each group's range clipped for the least error of its share of the output.

    ``search_scale`` comes before it.
    """

    needs_products = True
    needs_originals = False

    def __call__(
        self,
        weights: dict[str, Tensor],
        schemes: dict[str, Scheme],
        statistics: InputStatistics,
        result: LayerWeights,
    ) -> None:
        """Each module for itself."""
        for name, weight in weights.items():
            scheme = schemes[name]
            assert isinstance(scheme, WeightOnly), f"AWQ is for integer weights, not {scheme}"
            if statistics.num_tokens == 0:
                result.quantized[name] = quantize_rtn(weight, scheme)
                result.notes.append(f"{name} was rounded to nearest: no calibration token reached it")
            else:
                result.quantized[name] = quantize_clipped(weight, statistics.hessian, scheme)


def quantize_clipped(weight: Tensor, hessian: Tensor, scheme: WeightOnly) -> PackedWeight:
    """``weight`` [N, K] to the nearest codes, scales searched with the second moments ``hessian`` [K, K] of inputs.

    No group's share of the output is further off than ``quantize_rtn`` leaves it, whose scales begin the search.
    """
    rows, columns = weight.shape
    size = scheme.resolved_group_size(columns)
    groups = in_groups(weight, size)
    grid = search_grid(groups, scheme, diagonal_blocks(hessian, size), first=search_grid(groups, scheme))
    codes = (grid.levels(groups, 2**scheme.bits - 1) + grid.zero).to(torch.uint8).flatten(1)[:, :columns]
    return PackedWeight(
        scheme=WeightOnly(scheme.bits, -1 if size >= columns else size, scheme.symmetric),
        shape=(rows, columns),
        qweight=pack(codes, scheme.bits),
        scales=grid.scale.squeeze(-1).to(torch.float16),
        zeros=None if scheme.symmetric else grid.zero.squeeze(-1).to(torch.uint8),
    )


def diagonal_blocks(matrix: Tensor, size: int) -> Tensor:
    """The blocks [G, size, size] on the diagonal of a matrix [K, K]; a short last one is filled with zeros."""
    count = matrix.shape[0]
    padded = torch.nn.functional.pad(matrix.float(), (0, -count % size, 0, -count % size))
    groups = padded.shape[0] // size
    return padded.view(groups, size, groups, size).diagonal(dim1=0, dim2=2).permute(2, 0, 1).contiguous()
