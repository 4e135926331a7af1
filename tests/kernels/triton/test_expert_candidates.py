"""Which mixtures of experts the Triton kernels take, and the words in which they refuse."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from gpu_specs import gpu_spec
from twofold.kernels.kernel_set import KernelSet
from twofold.kernels.problems import ExpertLinearProblem, MoeRouteProblem
from twofold.quant.scheme import Dense, Offset, Scheme, WeightOnly

ROUTE = MoeRouteProblem(num_experts=256, top_k=8, dtype=torch.float32)

EXPERTS = ExpertLinearProblem(
    scheme=Dense(), num_experts=128, top_k=8, in_features=2048, out_features=1536, dtype=torch.bfloat16
)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "gfx942", "gfx1100"])
def test_routing_is_native(arch: str) -> None:
    assert KernelSet(gpu_spec(arch), strict=True).select_candidate("moe_route", ROUTE).name == "triton"


@pytest.mark.parametrize(
    ("change", "words"), [({"num_experts": 600}, "600 experts"), ({"top_k": 17}, "chooses at most 16")]
)
def test_what_routing_refuses(change: dict[str, int], words: str) -> None:
    kernels = KernelSet(gpu_spec("sm_90"))
    assert kernels.select_candidate("moe_route", replace(ROUTE, **change)).name == "torch"
    assert words in kernels.report()[0]["refused"]


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90", "gfx90a", "gfx942", "gfx1100"])
@pytest.mark.parametrize("scheme", [Dense(), WeightOnly(4, 128), WeightOnly(3, 64, symmetric=False)], ids=str)
def test_experts_are_native(arch: str, scheme: Scheme) -> None:
    candidate = KernelSet(gpu_spec(arch), strict=True).select_candidate(
        "expert_linear", replace(EXPERTS, scheme=scheme)
    )
    assert candidate.name == "triton" and candidate.prepared_bytes is not None
    size = 128 * 2048 * 1536 * 2 if scheme == Dense() else 77
    assert candidate.prepared_bytes(replace(EXPERTS, scheme=scheme), 77) == size


@pytest.mark.parametrize(
    ("arch", "change", "words"),
    [
        ("sm_90", {"num_experts": 600}, "600 experts"),
        ("sm_90", {"scheme": WeightOnly(5, 128)}, "5 bits"),
        ("sm_90", {"scheme": Offset(5, 128)}, "5 bits"),
        ("sm_75", {}, "no bfloat16 matrix instructions"),
    ],
)
def test_what_the_experts_refuse(arch: str, change: dict[str, object], words: str) -> None:
    kernels = KernelSet(gpu_spec(arch))
    assert kernels.select_candidate("expert_linear", replace(EXPERTS, **change)).name.startswith("loop_torch")
    assert words in kernels.report()[0]["refused"]
