"""Inputs rounded in C: the bits of ``reference.fake_quantize``, for every way that C knows."""

from __future__ import annotations

import pytest
import torch
from twofold.kernels.cpu import rounding
from twofold.kernels.cpu.library import unavailable
from twofold.kernels.reference import fake_quantize
from twofold.quant.scheme import Activation, Element

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=f"no compiled kernels: {unavailable()}")

FP8, FP4, INT8 = Element.FP8, Element.FP4, Element.INT8
CASES = [
    (Activation(FP8), 0.0, 0.0),
    (Activation(FP8, 128), 0.0, 0.0),
    (Activation(FP8, 0, dynamic=False), 0.013, 0.0),
    (Activation(FP8, 32, power_of_two=True), 0.0, 0.0),
    (Activation(FP4, 32, power_of_two=True), 0.0, 0.0),
    (Activation(FP4, 16, dynamic=False), 20.0, 0.0),
    (Activation(INT8), 0.0, 0.0),
    (Activation(INT8, symmetric=False), 0.0, 0.0),
    (Activation(INT8, 0, dynamic=False, symmetric=False), 0.02, -17.0),
]


def inputs(rows: int, columns: int, magnitude: float) -> torch.Tensor:
    """Values of very different sizes, exact ties of every kind, a row of zeros."""
    random = torch.Generator().manual_seed(rows * columns)
    x = torch.randn(rows, columns, generator=random) * torch.exp2(
        torch.randint(-20, 4, (rows, columns), generator=random)
    )
    x[0] = torch.arange(columns) * 2.0**-10 * (1 - 2 * (torch.arange(columns) % 2))
    x[-1] = 0
    return x * magnitude


@pytest.mark.parametrize(("how", "scale", "zero"), CASES, ids=lambda case: str(case))
@pytest.mark.parametrize(("rows", "columns"), [(2, 16), (3, 40), (5, 300), (4, 1001)])
def test_the_bits_of_the_definition(how: Activation, scale: float, zero: float, rows: int, columns: int) -> None:
    assert rounding.why_not(how) is None
    given = (torch.tensor(scale) if scale else None, torch.tensor(zero) if zero else None)
    for magnitude in (1.0, 1e-36, 3e4):
        x = inputs(rows, columns, magnitude)
        wanted = fake_quantize(x, how, *given)
        assert torch.equal(rounding.round_rows(x, how, scale, zero), wanted)
        apart = torch.zeros(rows, 2 * columns)
        apart[:, columns:] = x
        assert torch.equal(rounding.round_rows(apart[:, columns:], how, scale, zero), wanted)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("how", [Activation(FP8), Activation(FP8, 32), Activation(INT8)], ids=str)
def test_what_is_no_number_poisons_its_group_alone(how: Activation, value: float) -> None:
    x = torch.randn(3, 64)
    x[1, 5] = value
    rounded = rounding.round_rows(x, how)
    assert torch.equal(rounded.isnan(), fake_quantize(x, how).isnan()) and rounded.isnan().any()


def test_what_c_does_not_round() -> None:
    assert "all rows" in (rounding.why_not(Activation(FP8, 0)) or "")
    assert "not of 24" in (rounding.why_not(Activation(FP8, 24)) or "")
