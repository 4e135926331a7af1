"""What log-probabilities ask of whole rows of logits [R, V], answered without sorting the vocabulary."""

from __future__ import annotations

import math

import numpy as np
import torch
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


def count_above(values: Tensor, bounds: Tensor) -> Tensor:
    """How many of each row's values exceed its bound [R], int64 [R]; numpy compares faster than torch here."""
    if values.device.type == "cpu":
        rows = zip(values.numpy(), bounds.tolist(), strict=True)
        return torch.tensor([int(np.count_nonzero(row > bound)) for row, bound in rows])
    return (values > bounds[:, None]).sum(dim=1)


def _in_order(values: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """Equal values in the order of their columns."""
    columns, order = columns.sort(dim=1)
    ranked = values.gather(1, order).sort(dim=1, descending=True, stable=True)
    return ranked.values, columns.gather(1, ranked.indices)
