"""The k best of each row, without sorting the vocabulary."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_MIN_COLUMNS = 4096


def top_values(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The ``k`` largest of each row [R, V], best first, and their columns; of equal values the lower column leads.

    The row is cut into C strided groups. The k best lie in the k groups with the largest maxima, since each other
    group's maximum, and so all of it, is at most k other values; only those groups are searched.
    """
    num_columns = values.shape[1]
    group_size = int(math.sqrt(num_columns / max(k, 1)))
    if num_columns < _MIN_COLUMNS or group_size < 2:
        return _sorted(values, None, k)
    num_groups = num_columns // group_size
    covered = num_groups * group_size
    maxima = values[:, :covered].unflatten(1, (group_size, num_groups)).amax(dim=1)
    groups = maxima.topk(k, dim=1, sorted=False).indices
    offsets = torch.arange(group_size, device=values.device) * num_groups
    columns = (groups[:, :, None] + offsets).flatten(1)
    rest = torch.arange(covered, num_columns, device=values.device).expand(values.shape[0], -1)
    columns = torch.cat([columns, rest], dim=1).sort(dim=1).values
    return _sorted(values.gather(1, columns), columns, k)


def _sorted(candidates: Tensor, columns: Tensor | None, k: int) -> tuple[Tensor, Tensor]:
    """Candidates lie in the order of their columns, which a stable sort keeps among equals."""
    ordered = candidates.sort(dim=1, descending=True, stable=True)
    values, places = ordered.values[:, :k], ordered.indices[:, :k]
    return values, places if columns is None else columns.gather(1, places)


def argmax(values: Tensor) -> Tensor:
    """The column of each row's maximum, the first of equals, int64 [R]; a row with a NaN gives a NaN's column."""
    if values.device.type == "cpu":  # numpy's argmax is vectorized there, torch's is not
        return torch.from_numpy(values.numpy().argmax(axis=1))
    return values.argmax(dim=1)
