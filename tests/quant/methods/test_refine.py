"""Refitted scales and moved codes against the objective they lower."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from twofold.quant.methods.gptq import GPTQOptions, quantize_gptq
from twofold.quant.methods.grid import in_groups, search_grid
from twofold.quant.methods.refine import Codes, refine
from twofold.quant.methods.statistics import InputStatistics
from twofold.quant.scheme import WeightOnly

SIZES = [16, 32, 112]


def problem(columns: int = 112) -> tuple[Tensor, Tensor]:
    """(weight [40, K], second moments [K, K]), float32."""
    generator = torch.Generator().manual_seed(0)
    mix = torch.eye(columns) + 0.2 * torch.randn(columns, columns, generator=generator)
    x = torch.randn(400, columns, generator=generator) @ mix
    return torch.randn(40, columns, generator=generator) * 0.05, x.T @ x / 400


def nearest(weight: Tensor, size: int, *, positive: bool = False) -> Codes:
    grid = search_grid(in_groups(weight, size), WeightOnly(4, size, True), positive=positive)
    codes = grid.levels(in_groups(weight, size), 15) + grid.zero
    return Codes(
        codes.flatten(1)[:, : weight.shape[1]].T.contiguous(), grid.scale[..., 0].T, grid.zero[..., 0].T, size, 15
    )


def errors(rounded: Codes, weight: Tensor, hessian: Tensor) -> Tensor:
    """Per output feature, in float64, from scales and codes alone."""
    spread = torch.arange(weight.shape[1]) // rounded.group_size
    values = (rounded.codes.double() - rounded.zeros.double()[spread]) * rounded.scales.double()[spread]
    missed = values.T - weight.double()
    return ((missed @ hessian.double()) * missed).sum(1)


@pytest.mark.parametrize("positive", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_no_output_feature_becomes_worse(size: int, positive: bool) -> None:
    weight, hessian = problem()
    rounded = nearest(weight, size, positive=positive)
    before = errors(rounded, weight, hessian)
    refine(rounded, weight.T, hessian, positive=positive)
    after = errors(rounded, weight, hessian)
    assert (after <= before * (1 + 1e-4)).all() and after.sum() < 0.7 * before.sum()
    assert rounded.codes.min() >= 0 and rounded.codes.max() <= 15
    assert torch.equal(rounded.scales, rounded.scales.half().float()) and (not positive or (rounded.scales > 0).all())


def test_scales_are_the_least_squares_solution() -> None:
    """Scales alone (no pass over the codes), against a dense solver in float64, up to their float16."""
    weight, hessian = problem()
    rounded = nearest(weight, 32)
    levels = (rounded.codes - 8).double()
    refine(rounded, weight.T, hessian, passes=0)
    half = torch.linalg.cholesky(hessian.double()).T
    for row in range(0, 40, 7):
        columns = torch.zeros(112, 4, dtype=torch.float64)
        for group in range(4):
            part = slice(32 * group, 32 * (group + 1))
            columns[part, group] = levels[part, row]
        best = torch.linalg.lstsq(half @ columns, (half @ weight[row].double())[:, None]).solution[:, 0]
        torch.testing.assert_close(rounded.scales[:, row].double(), best, rtol=2e-3, atol=1e-5)


def test_no_single_code_could_be_better() -> None:
    weight, hessian = problem(48)
    rounded = nearest(weight, 48)
    refine(rounded, weight.T, hessian, passes=20)
    best = errors(rounded, weight, hessian)
    for column in range(0, 48, 5):
        for step in (-1, 1):
            kept = rounded.codes[column].clone()
            rounded.codes[column] = (kept + step).clamp(0, 15)
            assert (errors(rounded, weight, hessian) >= best * (1 - 1e-4)).all()
            rounded.codes[column] = kept


@pytest.mark.parametrize("order", ["none", "group", "static", "full"])
def test_gptq_is_closer_with_it(order: str) -> None:
    weight, hessian = problem()
    statistics = InputStatistics(112)
    statistics.add((torch.linalg.cholesky(hessian).T * 112**0.5).repeat(1000, 1))
    scheme = WeightOnly(3, 16, False)
    without, with_it = (
        quantize_gptq(weight, statistics, scheme, GPTQOptions(order=order, passes=passes)).error for passes in (0, 1)
    )
    assert with_it < 0.95 * without
