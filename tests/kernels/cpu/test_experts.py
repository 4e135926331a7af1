"""Products with experts in C: against float64, and bit for bit what the linear kernel gives each row alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from expert_cases import expected, random_ids, random_weights
from int8_cases import integer_weight
from tolerance import assert_near
from twofold.kernels.cpu import experts, linear, linear_int8
from twofold.kernels.cpu.library import unavailable
from twofold.kernels.kernel_set import KernelSet
from twofold.kernels.problems import ExpertLinearProblem
from twofold.platforms import cpu_threads
from twofold.platforms.cpu import CpuPlatform
from twofold.quant.scheme import Activation, Dense, Element, Fp8, Int8, Offset, Scheme, WeightOnly

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=f"no compiled kernels: {unavailable()}")

DENSE, PACKED = Dense(), WeightOnly(4, 32, symmetric=False)
ACT_ORDER = WeightOnly(4, 32, act_order=True)


def prepared(scheme: Scheme, num_experts: int, shape: tuple[int, int]) -> experts.ExpertPanels:
    prepare = linear.prepare_dense if isinstance(scheme, Dense) else linear.prepare_low_bit
    return experts.prepare(prepare, random_weights(scheme, num_experts, shape), torch.float32)


@pytest.mark.parametrize(
    "scheme", [DENSE, PACKED, ACT_ORDER, WeightOnly(8, -1), WeightOnly(2, 16), Offset(4, 16)], ids=str
)
@pytest.mark.parametrize(
    ("tokens", "num_experts", "top_k", "shape"),
    [(1, 8, 2, (33, 160)), (1, 1, 1, (1, 32)), (40, 3, 2, (100, 1312)), (9, 60, 4, (257, 48)), (200, 4, 1, (32, 64))],
)
def test_against_float64(scheme: Scheme, tokens: int, num_experts: int, top_k: int, shape: tuple[int, int]) -> None:
    random = torch.Generator().manual_seed(tokens)
    ids, routing = random_ids(tokens, num_experts, top_k), torch.rand(tokens, top_k, generator=random)
    ids[2:5] = -1
    weights = random_weights(scheme, num_experts, shape)
    panels = prepared(scheme, num_experts, shape)
    for x in (torch.randn(tokens, shape[1], generator=random), torch.randn(tokens, top_k, shape[1], generator=random)):
        for given in (None, routing):
            wanted, magnitude = expected(x, weights, ids, given, dtype=torch.float32)
            assert_near(experts.expert_linear(x, panels, ids, given), wanted, scale=magnitude, factor=1.0)


@pytest.mark.parametrize("scheme", [DENSE, PACKED, ACT_ORDER], ids=str)
@pytest.mark.parametrize("threads", [1, 3])
def test_a_row_is_what_its_expert_alone_gives(scheme: Scheme, threads: int) -> None:
    prepare = linear.prepare_dense if scheme == DENSE else linear.prepare_low_bit
    x, ids = torch.randn(37, 320, generator=torch.Generator().manual_seed(1)), random_ids(37, 5, 3)
    before = cpu_threads.num_threads()
    try:
        cpu_threads.set_num_threads(threads)
        result = experts.expert_linear(x, prepared(scheme, 5, (200, 320)), ids)
    finally:
        cpu_threads.set_num_threads(before)
    alone = [prepare(weight, torch.float32) for weight in random_weights(scheme, 5, (200, 320))]
    for token in range(37):
        for choice in range(3):
            row = linear.run(x[token : token + 1], alone[int(ids[token, choice])])[0]
            assert torch.equal(result[token, choice], row)


def test_scales_of_16_bits_alike_or_mixed_give_what_float32_gives() -> None:
    scheme = Offset(4, 32)
    half = [integer_weight(scheme, (40, 96), scale_dtype=torch.float16) for _ in range(3)]
    wide = [
        replace(each, scales=each.scales.float(), zeros=None if each.zeros is None else each.zeros.float())
        for each in half
    ]
    x, ids = torch.randn(9, 96, generator=torch.Generator().manual_seed(4)), random_ids(9, 3, 2)
    wanted = experts.expert_linear(x, experts.prepare(linear.prepare_low_bit, wide, torch.float32), ids)
    for weights in (half, [half[0], wide[1], half[2]]):
        panels = experts.prepare(linear.prepare_low_bit, weights, torch.float32)
        assert torch.equal(experts.expert_linear(x, panels, ids), wanted)


def test_lopsided_batches_and_strides() -> None:
    panels, random = prepared(PACKED, 4, (40, 96)), torch.Generator().manual_seed(2)
    x = torch.randn(96, 50, generator=random).T
    one = torch.full((50, 1), 3, dtype=torch.int32)
    alone = linear.run(x, linear.prepare_low_bit(random_weights(PACKED, 4, (40, 96))[3], torch.float32))
    assert torch.equal(experts.expert_linear(x, panels, one)[:, 0], alone)
    assert not experts.expert_linear(x, panels, one - 4).any()
    assert not experts.expert_linear(x, panels, one + 1, torch.ones(50, 1)).any()
    assert experts.expert_linear(x[:0], panels, one[:0], torch.ones(0, 1)).shape == (0, 40)


@pytest.mark.parametrize(
    "scheme",
    [
        PACKED,
        ACT_ORDER,
        Offset(4, 32),
        WeightOnly(2, 32),
        WeightOnly(3, 32),
        WeightOnly(8, -1),
        Int8((1, -1), Activation(Element.INT8)),
        Int8((-1, -1), Activation(Element.INT8, 0, dynamic=False)),
    ],
    ids=str,
)
@pytest.mark.parametrize("threads", [1, 3])
def test_inputs_in_8_bits_give_what_an_expert_alone_gives(scheme: Scheme, threads: int) -> None:
    shape, tokens = (72, 320), 61
    problem = ExpertLinearProblem(
        scheme=scheme, num_experts=5, top_k=3, in_features=320, out_features=72, dtype=torch.float32
    )
    kernels = KernelSet(CpuPlatform().spec, cpu_activations="int8")
    candidate = kernels.select_candidate("expert_linear", problem)
    assert candidate.name == "c_int8_activations" and candidate.prepare is not None and candidate.own_threads
    weights = random_weights(scheme, 5, shape)
    x, ids = torch.randn(tokens, 320, generator=torch.Generator().manual_seed(1)), random_ids(tokens, 5, 3)
    ids[7, 1] = -1
    cpu_threads.set_num_threads(threads)
    panels = candidate.prepare(weights, torch.float32)
    result = candidate.run(x, panels, ids)
    alone = [linear_int8.prepare(weight, torch.float32) for weight in weights]
    rows = [[linear_int8.run(x[t : t + 1], each)[0] for each in alone] for t in range(tokens)]
    wanted = torch.stack(
        [torch.stack([rows[t][e] if e >= 0 else torch.zeros(72) for e in ids[t]]) for t in range(tokens)]
    )
    assert torch.equal(result, wanted)
    assert torch.equal(candidate.run(x[:4], panels, ids[:4]), result[:4])


@pytest.mark.parametrize(
    ("scheme", "name"),
    [
        (DENSE, "c_dense_float32"),
        (Int8((1, -1), Activation(Element.INT8)), "c_int8_activations"),
        (PACKED, "c_low_bit_float32"),
        (Fp8((1, -1)), "c_small_floats"),
        (Int8((1, -1), Activation(Element.INT8, 0, False, False), symmetric=False), "c_low_bit_rounded"),
        (Fp8((32, 32), Activation(Element.FP8, 32)), "c_small_floats"),
        (Fp8((-1, -1), Activation(Element.FP8, 0, dynamic=False)), "c_small_floats"),
    ],
    ids=str,
)
def test_every_linear_kernel_in_c_serves_experts(scheme: Scheme, name: str) -> None:
    problem = ExpertLinearProblem(
        scheme=scheme, num_experts=5, top_k=2, in_features=64, out_features=40, dtype=torch.float32
    )
    candidate = KernelSet(CpuPlatform().spec).select_candidate("expert_linear", problem)
    assert candidate.name == name and candidate.own_threads and candidate.prepare is not None
    weights, ids = random_weights(scheme, 5, (40, 64)), random_ids(11, 5, 2)
    x = torch.randn(11, 64, generator=torch.Generator().manual_seed(3))
    wanted, magnitude = expected(x, weights, ids, dtype=torch.float32)
    assert_near(candidate.run(x, candidate.prepare(weights, torch.float32), ids), wanted, scale=magnitude, factor=1.0)
