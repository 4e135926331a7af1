"""GPTQ against its objective, computed from the inputs themselves, and where a Hessian is degenerate (B106, B107)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from twofold.quant.canonical import PackedWeight, dequantize
from twofold.quant.methods.gptq import GPTQOptions, quantize_gptq
from twofold.quant.methods.rtn import quantize_rtn
from twofold.quant.methods.statistics import InputStatistics
from twofold.quant.scheme import WeightOnly
from twofold.quant.spec import ORDERS

SCHEMES = [WeightOnly(4, 32, True), WeightOnly(3, 16, False), WeightOnly(8, -1, True), WeightOnly(4, 48, False)]


def inputs(num_tokens: int, size: int, seed: int = 0) -> Tensor:
    """Correlated features of unequal size, as activations are."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.eye(size) + 0.2 * torch.randn(size, size, generator=generator)
    return torch.randn(num_tokens, size, generator=generator) @ mix * torch.rand(size, generator=generator).mul(2).exp()


def weight_of(rows: int, columns: int, seed: int = 1) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.05


def statistics_of(x: Tensor, original: Tensor | None = None) -> InputStatistics:
    statistics = InputStatistics(x.shape[1], with_deviation=original is not None)
    statistics.add(x[: len(x) // 2], None if original is None else original[: len(x) // 2])
    statistics.add(x[len(x) // 2 :], None if original is None else original[len(x) // 2 :])
    return statistics


def output_error(x: Tensor, weight: Tensor, packed: PackedWeight) -> float:
    return float((x @ (dequantize(packed) - weight).T).norm() / (x @ weight.T).norm())


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_outputs_are_closer_than_rounded_to_nearest(scheme: WeightOnly, order: str) -> None:
    x, weight = inputs(400, 112), weight_of(40, 112)
    result = quantize_gptq(weight, statistics_of(x), scheme, GPTQOptions(order=order))
    error = output_error(x, weight, result.weight)
    assert result.fallback is None and error == pytest.approx(result.error, rel=1e-3)
    assert error < 0.9 * output_error(x, weight, quantize_rtn(weight, scheme))
    assert result.weight.scheme.act_order == (order == "full" and scheme.group_size != -1)


def test_the_target_is_the_original_models_output() -> None:
    """Inputs that earlier layers changed: the result must suit W X_original, not W X."""
    original = inputs(2000, 64)
    x = original @ (torch.eye(64) + 0.1 * torch.randn(64, 64, generator=torch.Generator().manual_seed(3)))
    weight, scheme = weight_of(48, 64), WeightOnly(8, 32, False)

    def distance(correction: float) -> float:
        options = GPTQOptions(correction=correction, damping=1e-5)
        packed = quantize_gptq(weight, statistics_of(x, original), scheme, options).weight
        return float((x @ dequantize(packed).T - original @ weight.T).norm() / (original @ weight.T).norm())

    assert distance(1.0) < 0.3 * distance(0.0)
    # Nothing linear in X does better than least squares does.
    best = torch.linalg.lstsq(x.double(), (original @ weight.T).double()).solution
    floor = float((x.double() @ best - original @ weight.T).norm() / (original @ weight.T).norm())
    assert distance(1.0) < floor + 0.02


@pytest.mark.parametrize("damping", [0.0, 0.01])
@pytest.mark.parametrize("num_tokens", [1, 4])
def test_fewer_tokens_than_features(num_tokens: int, damping: float) -> None:
    x, weight, scheme = inputs(num_tokens, 64), weight_of(32, 64), WeightOnly(4, 32, True)
    result = quantize_gptq(weight, statistics_of(x), scheme, GPTQOptions(damping=damping))
    assert dequantize(result.weight).isfinite().all()
    assert output_error(x, weight, result.weight) <= 1.05 * output_error(x, weight, quantize_rtn(weight, scheme)) + 1e-6


def test_tiny_and_indefinite_hessians() -> None:
    weight, scheme = weight_of(32, 64), WeightOnly(4, 32, True)
    for shift in (1e-12, -1e-6):
        statistics = statistics_of(inputs(4, 64))
        statistics._products += shift * torch.eye(64) * statistics.num_tokens
        assert dequantize(quantize_gptq(weight, statistics, scheme).weight).isfinite().all()


def test_a_hessian_that_stays_singular_is_rounded_to_nearest() -> None:
    statistics = statistics_of(inputs(4, 64))
    statistics._products[:] = -1e6 * torch.ones(64, 64)
    statistics._products.diagonal().fill_(1.0)
    weight, scheme = weight_of(32, 64), WeightOnly(4, 32, True)
    result = quantize_gptq(weight, statistics, scheme)
    assert result.fallback == "its Hessian stayed singular"
    assert torch.equal(dequantize(result.weight), dequantize(quantize_rtn(weight, scheme)))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_inputs_that_are_not_finite_are_an_error(bad: float) -> None:
    x = inputs(8, 64)
    x[3, 5] = bad
    with pytest.raises(ValueError, match="NaN or infinity"):
        quantize_gptq(weight_of(32, 64), statistics_of(x), WeightOnly(4, 32, True))


@pytest.mark.parametrize("order", ORDERS)
def test_dead_columns_change_no_other(order: str) -> None:
    """Large weights on inputs that are always zero: the rest comes out as if they were small."""
    x, weight, scheme = inputs(400, 64), weight_of(32, 64), WeightOnly(4, 32, True)
    x[:, [3, 60]] = 0
    loud = weight.clone()
    loud[:, [3, 60]] = 50.0
    quiet = quantize_gptq(weight, statistics_of(x), scheme, GPTQOptions(order=order)).weight
    packed = quantize_gptq(loud, statistics_of(x), scheme, GPTQOptions(order=order)).weight
    alive = [column for column in range(64) if column not in (3, 60)]
    assert torch.equal(dequantize(packed)[:, alive], dequantize(quiet)[:, alive])
    assert dequantize(packed).isfinite().all()


def test_no_token_at_all() -> None:
    weight, scheme = weight_of(32, 64), WeightOnly(4, 32, True)
    result = quantize_gptq(weight, InputStatistics(64), scheme)
    assert result.fallback == "no calibration token reached it"
    assert torch.equal(dequantize(result.weight), dequantize(quantize_rtn(weight, scheme)))


@pytest.mark.parametrize("order", ORDERS)
def test_inputs_that_are_all_zero(order: str) -> None:
    """B107: with nothing to weigh errors by, each weight is rounded to nearest."""
    weight, scheme = weight_of(32, 64), WeightOnly(4, 32, True)
    result = quantize_gptq(weight, statistics_of(torch.zeros(40, 64)), scheme, GPTQOptions(order=order))
    assert torch.equal(dequantize(result.weight), dequantize(quantize_rtn(weight, scheme)))


def test_dead_columns_need_no_damping() -> None:
    """B107: a zero on the diagonal does not keep the rest from its factorization."""
    x = inputs(4000, 64)
    x[:, [3, 60]] = 0
    result = quantize_gptq(weight_of(32, 64), statistics_of(x), WeightOnly(4, 32, True), GPTQOptions(damping=0.0))
    assert result.fallback is None and result.damping == 0.0


def test_damping_rises_until_the_hessian_is_definite() -> None:
    """B106: and only then; the error is still below that of rounding to nearest."""
    x, weight, scheme = inputs(4000, 64), weight_of(32, 64), WeightOnly(4, 32, True)
    statistics = statistics_of(x)
    hessian = statistics.hessian
    mean = float(hessian.diagonal().mean())
    shift = float(torch.linalg.eigvalsh(hessian)[0]) + 0.02 * mean
    statistics._products -= shift * float(statistics._products.trace() / hessian.trace()) * torch.eye(64)
    result = quantize_gptq(weight, statistics, scheme, GPTQOptions(damping=1e-4))
    assert result.fallback is None and result.damping > 2e-4 * mean
    assert output_error(x, weight, result.weight) <= 1.05 * output_error(x, weight, quantize_rtn(weight, scheme))
