"""Rows worked on in parts: all of them, in order, with the caller's mode and torch's own number of threads after."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from twofold.quant.threads import over_rows


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize(("rows", "at_once"), [(1, 8), (7, 8), (50, 24), (64, 1 << 20)])
def test_every_row_once_and_in_order(num_threads: int, rows: int, at_once: int) -> None:
    values, before = torch.arange(rows * 4.0).view(rows, 4), torch.get_num_threads()

    def double(part: slice) -> Tensor:
        assert torch.is_inference_mode_enabled()
        return values[part] * 2

    torch.set_num_threads(num_threads)
    try:
        with torch.inference_mode():
            parts = over_rows(double, rows, 4, at_once=at_once)
        assert torch.get_num_threads() == num_threads
    finally:
        torch.set_num_threads(before)
    assert torch.equal(torch.cat(parts), values * 2)
    assert all(len(part) <= max(1, at_once // 4) for part in parts)
