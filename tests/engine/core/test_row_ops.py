"""Row operations against full sorts."""

from __future__ import annotations

import pytest
import torch
from twofold.engine.core.row_ops import count_above, top_values


@pytest.mark.parametrize("num_columns", [7, 300, 4096, 5000, 49152])
@pytest.mark.parametrize("k", [1, 5, 64, 1000])
def test_top_values(num_columns: int, k: int) -> None:
    if k > num_columns:
        return
    values = torch.randn(3, num_columns, generator=torch.Generator().manual_seed(k))
    best, columns = top_values(values, k)
    expected = values.sort(dim=1, descending=True, stable=True)
    assert torch.equal(best, expected.values[:, :k]) and torch.equal(columns, expected.indices[:, :k])


def test_top_values_with_ties_keep_the_order_of_columns() -> None:
    values = torch.zeros(2, 5000)
    values[0, [4000, 17, 900]] = 1.0
    best, columns = top_values(values, 8)
    assert columns[0, :3].tolist() == [17, 900, 4000] and best[0].tolist() == [1.0] * 3 + [0.0] * 5
    assert all(len(set(row)) == 8 and row[3:] == sorted(row[3:]) for row in columns.tolist())


def test_top_values_of_a_row_do_not_depend_on_others() -> None:
    values = torch.randn(8, 49152).round(decimals=1)  # many ties
    together = top_values(values, 64)
    for row in range(8):
        alone = top_values(values[row : row + 1], 64)
        assert torch.equal(alone[0][0], together[0][row]) and torch.equal(alone[1][0], together[1][row])


def test_count_above() -> None:
    values = torch.randn(5, 1000)
    bounds = values[:, 3].clone()
    assert torch.equal(count_above(values, bounds), (values > bounds[:, None]).sum(1))
