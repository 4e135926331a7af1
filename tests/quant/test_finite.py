"""One pass over a tensor finds what is not finite, wherever it lies."""

from __future__ import annotations

import pytest
import torch
from twofold.quant.finite import is_finite


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("place", [0, 517, 1030])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_found(dtype: torch.dtype, place: int, bad: float) -> None:
    values = torch.linspace(-3, 3, 1031).to(dtype)
    assert is_finite(values)
    values[place] = bad
    assert not is_finite(values)


def test_nothing_is_finite() -> None:
    assert is_finite(torch.empty(0, 4))
