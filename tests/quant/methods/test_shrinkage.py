"""Second moments of few tokens, against those of the distribution that the tokens come from."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from twofold.quant.canonical import dequantize
from twofold.quant.methods.gptq import quantize_gptq
from twofold.quant.methods.shrinkage import shrunk
from twofold.quant.methods.statistics import InputStatistics
from twofold.quant.scheme import WeightOnly

SIZE = 96


def distribution(seed: int = 0) -> Tensor:
    """The square root of second moments with correlations and unequal diagonals, [SIZE, SIZE]."""
    generator = torch.Generator().manual_seed(seed)
    shared = torch.randn(SIZE, 12, generator=generator) @ torch.randn(12, SIZE, generator=generator) / 4
    return (shared + torch.eye(SIZE)) * torch.linspace(0.3, 3, SIZE)


def draws(root: Tensor, count: int) -> Tensor:
    return torch.randn(count, SIZE, generator=torch.Generator().manual_seed(count)) @ root


@pytest.mark.parametrize("count", [24, 96, 400])
def test_it_is_nearer_to_the_truth(count: int) -> None:
    root = distribution()
    x, truth = draws(root, count), root.T @ root
    found = x.T @ x / count
    scale = truth.diagonal().rsqrt()
    distances = [float(((one - truth) * scale[:, None] * scale).norm()) for one in (found, shrunk(found, count))]
    assert distances[1] < distances[0]
    assert torch.equal(shrunk(found, count).diagonal(), found.diagonal())


def test_many_tokens_change_nothing_and_independent_features_stay_so() -> None:
    root = distribution()
    truth = root.T @ root
    torch.testing.assert_close(shrunk(truth, 10**9), truth)
    assert torch.equal(shrunk(torch.diag(truth.diagonal()), 8), torch.diag(truth.diagonal()))


def test_dead_features() -> None:
    """They add nothing: the rest is shrunk as if they were not there."""
    x = draws(distribution(), 60)
    found = x.T @ x / 60
    wider = torch.zeros(SIZE + 8, SIZE + 8)
    wider[:SIZE, :SIZE] = found
    torch.testing.assert_close(shrunk(wider, 60)[:SIZE, :SIZE], shrunk(found, 60))
    assert not shrunk(wider, 60)[SIZE:].any()
    assert torch.equal(shrunk(torch.zeros(8, 8), 5), torch.zeros(8, 8))


def test_gptq_of_few_tokens_holds_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Features that hardly depend on each other: outputs of new inputs are nearer to the original's than without."""
    root = torch.eye(SIZE) + distribution() / 40
    statistics = InputStatistics(SIZE)
    statistics.add(draws(root, 2 * SIZE))
    weight = torch.randn(64, SIZE, generator=torch.Generator().manual_seed(1))
    others = draws(root, 4000)

    def error() -> float:
        rounded = dequantize(quantize_gptq(weight, statistics, WeightOnly(4, 32)).weight)
        return float((others @ (rounded - weight).T).norm())

    with_it = error()
    monkeypatch.setattr("twofold.quant.methods.gptq.shrunk", lambda hessian, num_tokens: hessian)
    assert with_it < 0.98 * error()
