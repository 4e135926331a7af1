"""Drawing tokens: temperature, then top_k, top_p, min_p, then one uniform number against the cumulated probabilities.

Each filter works on what the one before it left, renormalized, as in transformers. Every row is treated by its own
options alone, whichever rows lie beside it: candidates and the order of sums do not depend on the number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .row_ops import nucleus_floor, top_values

_SECTION = 256  # columns summed at once when the whole vocabulary takes part
_MIN_WIDTH = 64  # candidates looked at for a small top_k


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawOptions:
    """Options per row on the host, all [R]: temperature > 0, top_k (0: no limit), uniform in [0, 1)."""

    temperature: NDArray[np.float32]
    top_k: NDArray[np.int64]
    top_p: NDArray[np.float32]
    min_p: NDArray[np.float32]
    uniform: NDArray[np.float64]

    def take(self, rows: NDArray[np.int64]) -> DrawOptions:
        """The options of some of the rows."""
        return DrawOptions(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})


def draw(logits: Tensor, options: DrawOptions) -> Tensor:
    """One token per row of logits [R, V] float32, int64 [R]; -1 where a row's maximum is not finite."""
    widths = _widths(options, logits.shape[1])
    kinds = np.unique(widths)
    if len(kinds) == 1:
        return _draw_alike(logits, options, int(kinds[0]))
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    for width in kinds.tolist():
        rows = np.flatnonzero(widths == width)
        places = _on(logits, rows)
        tokens[places] = _draw_alike(logits[places], options.take(rows), width)
    return tokens


def _widths(options: DrawOptions, num_columns: int) -> NDArray[np.int64]:
    """How many of a row's best are looked at: a power of two for a row with top_k, else 0: the whole vocabulary."""
    is_limited = (options.top_k > 0) & (options.top_k < num_columns)
    powers = 2 ** np.ceil(np.log2(np.maximum(options.top_k, _MIN_WIDTH))).astype(np.int64)
    return np.where(is_limited, np.minimum(powers, num_columns), 0)


def _draw_alike(logits: Tensor, options: DrawOptions, width: int) -> Tensor:
    """Draw for rows of one kind."""
    temperature = _on(logits, options.temperature)[:, None]
    if width:
        best, columns = top_values(logits, width)
        maximum = best[:, :1]
        weights = ((best - maximum) / temperature).exp().double()
        weights *= torch.arange(width, device=logits.device) < _on(logits, options.top_k)[:, None]
        tokens = _draw_ranked(weights, columns, options)
    else:
        maximum = logits.amax(dim=1, keepdim=True)
        weights = (logits - maximum).div_(temperature).exp_()
        tokens = _draw_in_vocabulary_order(weights, options)
    return torch.where(maximum[:, 0].isfinite(), tokens, -1)


def _draw_ranked(weights: Tensor, columns: Tensor, options: DrawOptions) -> Tensor:
    """Cut float64 weights [R, C], best first, by top_p and min_p and draw one of their columns."""
    cumulated = weights.cumsum(dim=1)
    in_nucleus = cumulated - weights < _on(weights, options.top_p)[:, None] * cumulated[:, -1:]
    in_nucleus[:, 0] = True
    kept = torch.where(in_nucleus & (weights >= _on(weights, options.min_p)[:, None]), weights, 0.0)
    cumulated = kept.cumsum(dim=1)
    place = _position(cumulated, _on(weights, options.uniform) * cumulated[:, -1])
    return columns.gather(1, place[:, None])[:, 0]


def _draw_in_vocabulary_order(weights: Tensor, options: DrawOptions) -> Tensor:
    """Cut weights [R, V] by a floor, for top_p and min_p, then draw first a section, then a column in it."""
    if options.min_p.any() or (options.top_p < 1.0).any():
        floor = _floor(weights, options)[:, None]
        weights = (weights >= floor).float().mul_(weights)
    sections = _sections(weights)
    masses = sections.sum(dim=2).double()
    cumulated = masses.cumsum(dim=1)
    target = _on(weights, options.uniform) * cumulated[:, -1]
    section = _position(cumulated, target)[:, None]
    target -= (cumulated - masses).gather(1, section)[:, 0]
    inside = sections.gather(1, section[:, :, None].expand(-1, -1, _SECTION))[:, 0].double()
    tokens = section[:, 0] * _SECTION + _position(inside.cumsum(dim=1), target)
    return tokens.clamp_(max=weights.shape[1] - 1)


def _floor(weights: Tensor, options: DrawOptions) -> Tensor:
    """The smallest weight that the filters keep, float32 [R]; the nucleus keeps all that equal its last one."""
    floor = _on(weights, options.min_p.copy())
    rows = np.flatnonzero(options.top_p < 1.0)
    if len(rows):
        places = _on(weights, rows)
        part = weights if len(rows) == len(weights) else weights[places]
        total = _sections(part).sum(dim=2).double().sum(dim=1)
        top_p = _on(weights, options.top_p[rows]).double()
        floor[places] = torch.maximum(floor[places], nucleus_floor(part, total, top_p))
    return floor


def _sections(weights: Tensor) -> Tensor:
    """[R, V] cut into [R, sections, _SECTION], the last one filled up with zeros."""
    padding = -weights.shape[1] % _SECTION
    if padding:
        weights = torch.nn.functional.pad(weights, (0, padding))
    return weights.unflatten(1, (-1, _SECTION))


def _position(cumulated: Tensor, target: Tensor) -> Tensor:
    """The first column whose cumulated weight exceeds the target; never past the last column with any weight."""
    last = torch.searchsorted(cumulated, cumulated[:, -1:].contiguous())
    found = torch.searchsorted(cumulated, target[:, None], right=True)
    return torch.minimum(found, last)[:, 0].clamp_(max=cumulated.shape[1] - 1)


def _on(tensor: Tensor, array: NDArray[np.generic]) -> Tensor:
    return torch.from_numpy(array).to(tensor.device, non_blocking=True)
