"""Experts one after the other: every scheme, on the CPU's kernels and on a GPU's last resort."""

from __future__ import annotations

import pytest
import torch
from expert_cases import expected, random_ids, random_weights
from gpu_specs import gpu_spec
from tolerance import assert_near
from twofold.kernels.kernel_set import KernelSet, default_registry
from twofold.kernels.problems import ExpertLinearProblem, MoeRouteProblem
from twofold.kernels.registry import Candidate
from twofold.platforms.cpu import CpuPlatform
from twofold.quant.scheme import Activation, Dense, Element, Fp8, Int8, Scheme, WeightOnly

N, K, EXPERTS = 40, 64, 6
SCHEMES = [
    Dense(),
    WeightOnly(4, 32),
    WeightOnly(3, 32),
    WeightOnly(4, 32, symmetric=False, act_order=True),
    Int8((1, -1), Activation(Element.INT8)),
    Fp8((1, -1), Activation(Element.FP8)),
    Fp8((32, 32)),
]


def problem_of(scheme: Scheme, dtype: torch.dtype, top_k: int = 2) -> ExpertLinearProblem:
    return ExpertLinearProblem(
        scheme=scheme, num_experts=EXPERTS, top_k=top_k, in_features=K, out_features=N, dtype=dtype
    )


def check(candidate: Candidate, scheme: Scheme, dtype: torch.dtype, ids: torch.Tensor) -> None:
    """One candidate against the float64 definition, with one row per token and with one per choice."""
    assert candidate.prepare is not None
    weights = random_weights(scheme, EXPERTS, (N, K))
    prepared = candidate.prepare(weights, dtype)
    random = torch.Generator().manual_seed(3)
    routing = torch.rand(ids.shape, generator=random)
    for shape in ((ids.shape[0], K), (*ids.shape, K)):
        x = torch.randn(shape, generator=random).to(dtype)
        for given in (None, routing):
            want, magnitude = expected(x, weights, ids, given, dtype=dtype)
            # A dequantized weight and each expert's row are rounded to dtype on the way.
            assert_near(candidate.run(x, prepared, ids, given), want, scale=magnitude + 1e-9, factor=1.0)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_cpu_serves_every_scheme(scheme: Scheme, dtype: torch.dtype) -> None:
    candidate = KernelSet(CpuPlatform().spec).select_candidate("expert_linear", problem_of(scheme, dtype))
    ids = random_ids(9, EXPERTS, 2)
    ids[ids == 3] = -1
    check(candidate, scheme, dtype, ids)


@pytest.mark.parametrize(
    "ids",
    [torch.empty(0, 2), torch.full((4, 2), -1), torch.full((5, 1), 3), torch.tensor([[5, 0, 1]])],
    ids=["no tokens", "no expert", "one expert", "one token"],
)
def test_lopsided_batches(ids: torch.Tensor) -> None:
    problem = problem_of(WeightOnly(4, 32), torch.float32)
    candidate = KernelSet(CpuPlatform().spec).select_candidate("expert_linear", problem)
    if ids.numel():
        check(candidate, WeightOnly(4, 32), torch.float32, ids.int())
    else:
        assert candidate.prepare is not None
        prepared = candidate.prepare(random_weights(WeightOnly(4, 32), EXPERTS, (N, K)), torch.float32)
        assert candidate.run(torch.empty(0, K), prepared, ids.int(), torch.empty(0, 2)).shape == (0, N)


def test_a_gpu_without_a_kernel_loops_and_says_so() -> None:
    scheme = Fp8((1, -1), Activation(Element.FP8))
    candidates = default_registry(gpu_spec("gfx942")).candidates("expert_linear")
    candidate = next(row for row in candidates if row.name == "loop_torch_unpacking_emulated")
    assert candidate.quality.value == "reference"
    check(candidate, scheme, torch.bfloat16, random_ids(5, EXPERTS, 2))


def test_every_expert_counts_in_memory() -> None:
    candidate = KernelSet(CpuPlatform().spec).select_candidate("expert_linear", problem_of(Dense(), torch.float32))
    assert candidate.prepared_bytes is not None and candidate.prepare is not None
    prepared = candidate.prepare(random_weights(Dense(), EXPERTS, (N, K)), torch.float32)
    held = sum(each.panels.nbytes for each in prepared.weights)
    assert candidate.prepared_bytes(problem_of(Dense(), torch.float32), 4 * EXPERTS * N * K) == held


def test_routing_has_a_kernel_everywhere() -> None:
    problem = MoeRouteProblem(num_experts=8, top_k=2, dtype=torch.float32)
    for spec in (CpuPlatform().spec, gpu_spec("sm_90")):
        assert callable(KernelSet(spec).select("moe_route", problem))
