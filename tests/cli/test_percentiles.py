"""Percentiles against numpy; tables by eye."""

import math

import numpy
import pytest
from twofold.cli.percentiles import percentile, summary, table


@pytest.mark.parametrize("size", [1, 2, 3, 10, 101])
@pytest.mark.parametrize("percent", [0, 1, 50, 90, 99, 100])
def test_percentile_is_numpys(size: int, percent: float) -> None:
    values = list(numpy.random.default_rng(size).normal(size=size))
    assert percentile(values, percent) == pytest.approx(numpy.percentile(values, percent))


def test_of_nothing() -> None:
    assert all(math.isnan(value) for value in summary([]).values())


def test_table_is_aligned() -> None:
    assert table([["a", "x"], ["long name", "1.25"]]).splitlines() == ["a             x", "long name  1.25"]
