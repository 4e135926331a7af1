"""GPTQ's loops and its search for scales in C: what torch's operations, one by one, give as well."""

from __future__ import annotations

import pytest
import torch
from twofold.kernels.cpu import gptq as compiled
from twofold.kernels.cpu.library import unavailable
from twofold.quant import conversions
from twofold.quant.canonical import dequantize
from twofold.quant.methods import grid, refine
from twofold.quant.methods.gptq import GPTQOptions, output_error, quantize_gptq
from twofold.quant.methods.statistics import InputStatistics
from twofold.quant.scheme import WeightOnly

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=f"no compiled kernels: {unavailable()}")
# A value in the middle of two codes may fall to either side where a processor has no fused multiplication.
SAME = 0.999


@pytest.fixture
def offered(monkeypatch: pytest.MonkeyPatch) -> dict[str, conversions.Conversion]:
    """Nothing offered; what C offers is put there by the test."""
    nothing: dict[str, conversions.Conversion] = {}
    monkeypatch.setattr(conversions, "_offered", nothing)
    return nothing


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def same_share(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found == expected).float().mean())


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(("rows", "groups", "size"), [(5, 3, 32), (130, 2, 64), (3, 1, 1024)])
@pytest.mark.parametrize("positive", [False, True])
def test_search(
    bits: int, rows: int, groups: int, size: int, positive: bool, offered: dict[str, conversions.Conversion]
) -> None:
    weights = random(rows, groups, size) * torch.logspace(-9, 2, rows)[:, None, None]
    weights[0, 0] = 0.0
    weights[1, 0] = weights[1, 0].abs()  # nothing below zero
    scheme = WeightOnly(bits, size, False)
    expected = grid.search_grid(weights, scheme, positive=positive)
    compiled.offer_gptq()
    found = grid.search_grid(weights, scheme, positive=positive)
    assert same_share(found.scale, expected.scale) >= SAME and same_share(found.zero, expected.zero) >= SAME
    assert (found.scale.half().float() == found.scale).all() and (found.scale > 0).all()


def test_what_c_does_not_search(offered: dict[str, conversions.Conversion]) -> None:
    fractions = [1.0, 0.9]
    assert compiled.search_grids(random(2, 3, 24), fractions, 15, 2, False) is None  # no whole vectors
    assert compiled.search_grids(random(1, 1, 2048), fractions, 15, 2, False) is None  # another order of sums
    assert compiled.search_grids(random(2, 3, 64).double(), fractions, 15, 2, False) is None
    assert compiled.search_grids(random(2, 64, 3).mT, fractions, 15, 2, False) is None
    with_importance = grid.search_grid(random(2, 3, 64), WeightOnly(4, 64, False), torch.rand(3, 64))
    compiled.offer_gptq()
    again = grid.search_grid(random(2, 3, 64), WeightOnly(4, 64, False), torch.rand(3, 64))
    assert with_importance.scale.shape == again.scale.shape


def block(rows: int, columns: int) -> tuple[torch.Tensor, ...]:
    """(scales, zeros, groups) of two groups that columns alternate between."""
    scales = random(2, rows, seed=1).abs() + 0.1
    return scales, torch.randint(0, 16, (2, rows)).float(), torch.arange(columns) % 2


@pytest.mark.parametrize("rows", [1, 16, 70, 200])
def test_rounding_column_by_column(rows: int) -> None:
    """Against the definition in float64, where no value lies near the middle of two codes."""
    scales, zeros, groups = block(rows, 40)
    weight, factor = random(40, rows), random(40, 40, seed=2).triu() * 0.1 + torch.eye(40)
    expected, codes = weight.double().clone(), torch.full((40, rows), -1.0)
    found = weight.clone()
    errors = compiled.round_columns(found, factor, (8, 40), scales, zeros, groups, 15, codes)
    assert errors is not None and (codes[:8] == -1).all() and torch.equal(found[:8], weight[:8])
    for column in range(8, 40):
        scale, zero = scales[column % 2].double(), zeros[column % 2].double()
        exact = expected[column] / scale + zero
        assert ((codes[column] - exact.clamp(0, 15)).abs() < 0.5 + 1e-3).all()
        error = (expected[column] - (codes[column] - zero) * scale) / factor[column, column].double()
        torch.testing.assert_close(errors[column - 8].double(), error, atol=1e-4, rtol=1e-4)
        expected[column + 1 :] -= factor[column, column + 1 :, None].double() * error


@pytest.mark.parametrize("rows", [1, 16, 70, 200])
def test_moving_codes(rows: int) -> None:
    scales, zeros, groups = block(rows, 40)
    values, gradient, half = random(40, rows), random(40, rows, seed=3), random(40, 60, seed=4)
    moments = half @ half.T / 60
    steps = -1 / moments.diagonal()
    expected, codes, moved = gradient.double().clone(), torch.zeros(40, rows), gradient.clone()
    changes = compiled.move_codes(values, moved, moments, steps, (0, 40), scales, zeros, groups, 15, codes)
    assert changes is not None
    for column in range(40):
        scale, zero = scales[column % 2].double(), zeros[column % 2].double()
        best = values[column] + expected[column] * steps[column].double()
        assert ((codes[column] - (best / scale + zero).clamp(0, 15)).abs() < 0.5 + 1e-3).all()
        change = (codes[column] - zero) * scale - values[column]
        torch.testing.assert_close(changes[column].double(), change, atol=1e-4, rtol=1e-4)
        expected[column + 1 :] += moments[column, column + 1 :, None].double() * change


@pytest.mark.parametrize("order", ["none", "group", "static", "full"])
@pytest.mark.parametrize(("group_size", "columns"), [(32, 96), (16, 80), (64, 100), (-1, 96)])
@pytest.mark.parametrize("symmetric", [False, True])
def test_the_whole_method(
    order: str, group_size: int, columns: int, symmetric: bool, offered: dict[str, conversions.Conversion]
) -> None:
    weight, inputs = random(70, columns), random(400, columns, seed=5) @ random(columns, columns, seed=6)
    statistics = InputStatistics(columns)
    statistics.add(inputs)
    scheme, options = WeightOnly(4, group_size, symmetric), GPTQOptions(order=order)
    expected = quantize_gptq(weight, statistics, scheme, options).weight
    called: list[str] = []
    compiled.offer_gptq()
    for name, function in list(offered.items()):
        offered[name] = lambda *args, name=name, function=function: (called.append(name), function(*args))[1]
    found = quantize_gptq(weight, statistics, scheme, options).weight
    assert {"gptq_round", "gptq_move"} <= set(called) or group_size == 16
    assert same_share(dequantize(found), dequantize(expected)) > 0.9
    errors = [output_error(weight, result, statistics.hessian) for result in (found, expected)]
    assert errors[0] == pytest.approx(errors[1], rel=1e-3)


def test_long_blocks_stay_in_torch() -> None:
    scales, zeros, groups = block(8, 70)
    codes = torch.zeros(70, 8)
    assert compiled.round_columns(random(70, 8), torch.eye(70), (0, 70), scales, zeros, groups, 15, codes) is None
    assert refine.BLOCK <= 64
