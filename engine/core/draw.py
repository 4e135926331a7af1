"""Drawing tokens: temperature, then top_k, top_p, min_p, then one uniform number against the cumulated probabilities.

Each filter works on what the one before it left, renormalized, as in transformers. Every row is treated by its own
options alone, whichever rows lie beside it: sums run in an order that the number of rows does not change.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .top_values import top_values

_NUCLEUS_SIZE = 256  # candidates looked at first for a row with top_p; a wider nucleus costs a full sort
_SECTION = 256  # columns summed at once when the whole vocabulary takes part


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
    maximum = logits.amax(dim=1, keepdim=True)
    weights = (logits - maximum).div_(_on(logits, options.temperature)[:, None]).exp_()
    ranked = ((options.top_k > 0) & (options.top_k < logits.shape[1])) | (options.top_p < 1.0)
    if ranked.all():
        tokens = _draw_ranked(weights, options)
    elif not ranked.any():
        tokens = _draw_dense(weights, options)
    else:
        tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        for mask, draw_part in ((ranked, _draw_ranked), (~ranked, _draw_dense)):
            rows = np.flatnonzero(mask)
            places = _on(logits, rows)
            tokens[places] = draw_part(weights[places], options.take(rows))
    return torch.where(maximum[:, 0].isfinite(), tokens, -1)


def _draw_dense(weights: Tensor, options: DrawOptions) -> Tensor:
    """No filter that needs an order: draw in vocabulary order, first a section, then a column in it."""
    if options.min_p.any():
        weights = torch.where(weights < _on(weights, options.min_p)[:, None], 0.0, weights)
    sections = _sections(weights)
    masses = sections.sum(dim=2).double()
    cumulated = masses.cumsum(dim=1)
    target = _on(weights, options.uniform) * cumulated[:, -1]
    section = _position(cumulated, target)[:, None]
    target -= (cumulated - masses).gather(1, section)[:, 0]
    inside = sections.gather(1, section[:, :, None].expand(-1, -1, _SECTION))[:, 0].double()
    tokens = section[:, 0] * _SECTION + _position(inside.cumsum(dim=1), target)
    return tokens.clamp_(max=weights.shape[1] - 1)


def _draw_ranked(weights: Tensor, options: DrawOptions) -> Tensor:
    """Draw from the best tokens in order of probability."""
    num_columns = weights.shape[1]
    limit = np.where(options.top_k > 0, np.minimum(options.top_k, num_columns), num_columns)
    unlimited = np.flatnonzero(limit == num_columns)
    width = int(limit[limit < num_columns].max(initial=0))
    if len(unlimited):
        width = max(width, min(_NUCLEUS_SIZE, num_columns))
    best, columns = top_values(weights, width)
    kept = best.double() * (torch.arange(width, device=best.device) < _on(weights, limit)[:, None])
    total = kept.cumsum(dim=1)[:, -1]
    if not len(unlimited):
        return _draw_kept(kept, total, columns, options)
    places = _on(weights, unlimited)
    whole = _sections(weights[places]).sum(dim=2).double().sum(dim=1)
    is_wide = (total[places] < _on(weights, options.top_p[unlimited]) * whole).cpu().numpy()
    total[places] = whole
    tokens = _draw_kept(kept, total, columns, options)
    wide = unlimited[is_wide]
    if len(wide):
        places = _on(weights, wide)
        best, columns = weights[places].sort(dim=1, descending=True, stable=True)
        tokens[places] = _draw_kept(best.double(), total[places], columns, options.take(wide))
    return tokens


def _draw_kept(kept: Tensor, total: Tensor, columns: Tensor, options: DrawOptions) -> Tensor:
    """Cut sorted weights [R, C] by top_p (of ``total``) and min_p and draw one of their columns."""
    before = kept.cumsum(dim=1) - kept
    in_nucleus = before < (_on(kept, options.top_p) * total)[:, None]
    in_nucleus[:, 0] = True
    kept = torch.where(in_nucleus & (kept >= _on(kept, options.min_p)[:, None]), kept, 0.0)
    cumulated = kept.cumsum(dim=1)
    place = _position(cumulated, _on(kept, options.uniform) * cumulated[:, -1])
    return columns.gather(1, place[:, None])[:, 0]


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
