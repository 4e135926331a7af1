"""Questions about whole rows of logits or weights [R, V], answered without torch sorting the vocabulary.

On the CPU numpy answers some of them: its argmax, comparison counts and sort are vectorized there, torch's are not.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_MIN_COLUMNS = 4096


def top_values(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The ``k`` largest of each row [R, V], best first, and their columns; of equal ones the lower column leads.

    The row is cut into C strided groups. The k best lie in the k groups with the largest maxima, since what another
    group holds is at most as large as those k maxima; only these groups are searched.
    """
    num_columns = values.shape[1]
    group_size = int(math.sqrt(num_columns / max(k, 1)))
    if num_columns < _MIN_COLUMNS or group_size < 2:
        return _in_order(*values.topk(k, dim=1))
    num_groups = num_columns // group_size
    covered = num_groups * group_size
    maxima = values[:, :covered].unflatten(1, (group_size, num_groups)).amax(dim=1)
    groups = maxima.topk(k, dim=1, sorted=False).indices
    offsets = torch.arange(group_size, device=values.device) * num_groups
    rest = torch.arange(covered, num_columns, device=values.device).expand(values.shape[0], -1)
    columns = torch.cat([(groups[:, :, None] + offsets).flatten(1), rest], dim=1)
    best, places = values.gather(1, columns).topk(k, dim=1)
    return _in_order(best, columns.gather(1, places))


def argmax(values: Tensor) -> Tensor:
    """The column of each row's maximum, the first of equals, int64 [R]; a row with a NaN gives a NaN's column."""
    if values.device.type == "cpu":
        return torch.from_numpy(values.numpy().argmax(axis=1))
    return values.argmax(dim=1)


def count_above(values: Tensor, bounds: Tensor) -> Tensor:
    """How many of each row's values exceed its bound [R], int64 [R]."""
    if values.device.type == "cpu":
        rows = zip(values.numpy(), bounds.tolist(), strict=True)
        return torch.tensor([int(np.count_nonzero(row > bound)) for row, bound in rows])
    return (values > bounds[:, None]).sum(dim=1)


def nucleus_floor(weights: Tensor, total: Tensor, top_p: Tensor) -> Tensor:
    """The largest weight per row such that those from there up sum to ``top_p * total``; all [R], float32 result."""
    if weights.device.type == "cpu":
        rows = zip(weights.numpy(), total.tolist(), top_p.tolist(), strict=True)
        return torch.tensor([_nucleus_floor(*row) for row in rows])
    ordered = weights.sort(dim=1, descending=True).values
    place = torch.searchsorted(ordered.double().cumsum(dim=1), (top_p * total)[:, None])
    return ordered.gather(1, place.clamp_(max=weights.shape[1] - 1))[:, 0]


def _nucleus_floor(weights: NDArray[np.float32], total: float, top_p: float) -> float:
    """V weights each under (1 - top_p) * total / V sum up to less than what is left out; these are not sorted."""
    candidates = weights[weights >= (1.0 - top_p) * total / len(weights)]
    ordered = np.sort(candidates)[::-1]
    place = int(np.searchsorted(np.cumsum(ordered, dtype=np.float64), top_p * total))
    return float(ordered[min(place, len(ordered) - 1)]) if len(ordered) else 0.0


def _in_order(values: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """Equal values in the order of their columns."""
    columns, order = columns.sort(dim=1)
    ranked = values.gather(1, order).sort(dim=1, descending=True, stable=True)
    return ranked.values, columns.gather(1, ranked.indices)
