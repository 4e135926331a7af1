"""Products with experts against float64, block by block and over lopsided batches."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from expert_cases import expected, random_ids, random_weights
from tolerance import assert_near
from torch import Tensor
from twofold.kernels.triton import expert_dense, expert_packed, expert_scaled
from twofold.kernels.triton.expert_sum import sum_experts
from twofold.kernels.triton.experts import expert_linear
from twofold.kernels.triton.launch_table import LinearLaunch
from twofold.kernels.triton.scaled_weight import prepare_native, prepare_wide
from twofold.quant.canonical import CanonicalWeight, DenseWeight
from twofold.quant.scheme import Activation, Dense, Element, Fp8, Int8, Offset, Scheme, WeightOnly

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SMALL = LinearLaunch(16, 32, 64, 4, 1)
Run = Callable[[Tensor, list[CanonicalWeight], Tensor], Tensor]


def dense(x: Tensor, weights: list[CanonicalWeight], ids: Tensor) -> Tensor:
    return expert_dense.launch_dense(x, expert_dense.prepare(weights, x.dtype), ids, SMALL)


def packed(x: Tensor, weights: list[CanonicalWeight], ids: Tensor) -> Tensor:
    return expert_packed.launch_packed(x, expert_packed.prepare(weights, x.dtype), ids, SMALL)


def scaled(x: Tensor, weights: list[CanonicalWeight], ids: Tensor) -> Tensor:
    return expert_linear(x, expert_scaled.prepare(prepare_native, weights, x.dtype), ids)


def decoded(x: Tensor, weights: list[CanonicalWeight], ids: Tensor) -> Tensor:
    return expert_linear(x, expert_scaled.prepare(prepare_wide, weights, x.dtype), ids)


RUNS: dict[str, tuple[Scheme, Run]] = {
    "dense": (Dense(), dense),
    "4 bits": (WeightOnly(4, 16, symmetric=False), packed),
    "int8": (Int8((1, -1), Activation(Element.INT8)), scaled),
    "fp8": (Fp8((-1, -1), Activation(Element.FP8)), scaled),
    "fp8 blocks": (Fp8((16, 32), Activation(Element.FP8, 32)), scaled),
    "fp8 weights": (Fp8((1, -1)), decoded),
}
by_kind = pytest.mark.parametrize("kind", list(RUNS))


def check(kind: str, x: Tensor, ids: Tensor, num_experts: int, shape: tuple[int, int]) -> Tensor:
    """One kernel against the definition; its result [T,k,N]."""
    scheme, run = RUNS[kind]
    weights = random_weights(scheme, num_experts, shape)
    actual = run(x, weights, ids)
    wanted, magnitude = expected(x, weights, ids, dtype=x.dtype)
    assert_near(actual, wanted, scale=magnitude / 4 + 1e-9)
    return actual


def rows(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@by_kind
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_and_rows_per_choice(kind: str, dtype: torch.dtype) -> None:
    ids = random_ids(7, 5, 2)
    check(kind, rows(7, 128, dtype=dtype), ids, 5, (40, 128))
    check(kind, rows(7, 2, 128, dtype=dtype), ids, 5, (40, 128))


@by_kind
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "shape"),
    [(1, 8, 2, (33, 144)), (1, 1, 1, (1, 16)), (3, 1, 1, (17, 144)), (2, 60, 4, (16, 32)), (2, 3, 2, (1000, 32))],
)
def test_ugly_sizes(kind: str, tokens: int, experts: int, top_k: int, shape: tuple[int, int]) -> None:
    check(kind, rows(tokens, shape[1]), random_ids(tokens, experts, top_k), experts, shape)


@by_kind
def test_lopsided_batches(kind: str) -> None:
    x = rows(40, 64)
    check(kind, x, torch.full((40, 1), 2, dtype=torch.int32), 4, (24, 64))
    none = torch.full((3, 2), -1, dtype=torch.int32)
    assert not check(kind, x[:3], none, 4, (24, 64)).any()
    some = random_ids(20, 4, 2)
    some[::3, 1] = -1
    assert not check(kind, x[:20], some, 4, (24, 64))[::3, 1].any()
    assert RUNS[kind][1](x[:0], random_weights(RUNS[kind][0], 4, (24, 64)), some[:0]).shape == (0, 2, 24)


@by_kind
def test_a_row_does_not_see_its_batch(kind: str) -> None:
    scheme, run = RUNS[kind]
    weights = random_weights(scheme, 6, (32, 96))
    x, ids = rows(30, 96), random_ids(30, 6, 2)
    together = run(x, weights, ids)
    assert torch.equal(together, run(x, weights, ids))
    for token in (0, 11, 29):
        assert torch.equal(run(x[token : token + 1], weights, ids[token : token + 1])[0], together[token])
    turned = torch.arange(29, -1, -1)
    assert torch.equal(run(x[turned], weights, ids[turned]), together[turned])


@pytest.mark.parametrize(
    "scheme",
    [
        WeightOnly(4, 128),
        WeightOnly(2, -1),
        WeightOnly(3, 32, symmetric=False),
        WeightOnly(8, 64, act_order=True),
        Offset(4, 32),
    ],
    ids=str,
)
def test_packed_schemes(scheme: WeightOnly | Offset) -> None:
    weights, x, ids = random_weights(scheme, 3, (24, 256)), rows(5, 256, dtype=torch.float32), random_ids(5, 3, 2)
    wanted, magnitude = expected(x, weights, ids, dtype=x.dtype)
    assert_near(packed(x, weights, ids), wanted, scale=magnitude)


@pytest.mark.parametrize("own_rows", [False, True])
@pytest.mark.parametrize(
    "scheme",
    [
        Fp8((-1, -1), Activation(Element.FP8, 0, dynamic=False)),
        Int8((1, -1), Activation(Element.INT8, 0, dynamic=False, symmetric=False), symmetric=False),
        Int8((1, 16), Activation(Element.INT8, symmetric=False), symmetric=False),
    ],
    ids=str,
)
def test_zero_points_and_static_scales_of_each_expert(scheme: Scheme, own_rows: bool) -> None:
    x = rows(6, 2, 64, dtype=torch.float32) if own_rows else rows(6, 64, dtype=torch.float32)
    weights, ids = random_weights(scheme, 3, (24, 64)), random_ids(6, 3, 2)
    ids[4, 1] = -1
    wanted, magnitude = expected(x, weights, ids, dtype=x.dtype)
    assert_near(scaled(x, weights, ids), wanted, scale=magnitude)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weighted_sum(dtype: torch.dtype) -> None:
    parts, weights = rows(5, 3, 700, dtype=dtype), torch.rand(5, 3, generator=torch.Generator().manual_seed(2))
    wanted = (parts.double() * weights.double()[..., None]).sum(1)
    assert_near(sum_experts(parts, weights), wanted, factor=1.0)
    assert sum_experts(parts[:0], weights[:0]).shape == (0, 700)


@by_kind
def test_ids_changed_in_place_are_sorted_again(kind: str) -> None:
    scheme, run = RUNS[kind]
    weights = random_weights(scheme, 4, (16, 32))
    x, ids = rows(6, 32), random_ids(6, 4, 2)
    run(x, weights, ids)
    ids.copy_(ids.flip(0))
    assert torch.equal(run(x, weights, ids), run(x, weights, ids.clone()))


def test_neighbours_in_one_tensor_are_not_copied() -> None:
    whole = torch.randn(4, 8, 16)
    prepared: Any = expert_dense.prepare([DenseWeight(part) for part in whole], torch.float32)
    assert prepared.weight.data_ptr() == whole.data_ptr() and torch.equal(prepared.weight, whole)
    apart: Any = expert_dense.prepare([DenseWeight(part.clone()) for part in whole], torch.float32)
    assert torch.equal(apart.weight, whole)


class OneByOne(Sequence[CanonicalWeight]):
    """Weights made when they are asked for; ``most`` counts how many large tensors were alive at once."""

    def __init__(self, scheme: Scheme, count: int) -> None:
        self._scheme, self._count, self.most = scheme, count, 0
        self._alive: list[weakref.ref[torch.Tensor]] = []

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        if index >= self._count:
            raise IndexError(index)
        weight = random_weights(self._scheme, 1, (24, 256), seed=index)[0]
        self._alive.append(weakref.ref(weight.weight if isinstance(weight, DenseWeight) else weight.qweight))
        self.most = max(self.most, sum(each() is not None for each in self._alive))
        return weight


@pytest.mark.parametrize("scheme", [Dense(), WeightOnly(4, 32)], ids=str)
def test_experts_go_to_their_places_as_they_come(scheme: Scheme) -> None:
    weights = OneByOne(scheme, 6)
    prepared = (expert_dense if scheme == Dense() else expert_packed).prepare(weights, torch.float32)
    assert weights.most <= 2
    found = prepared.weight if scheme == Dense() else prepared.stream
    for index in range(6):
        weight = weights[index]
        assert torch.equal(found[index], weight.weight if scheme == Dense() else weight.qweight)
