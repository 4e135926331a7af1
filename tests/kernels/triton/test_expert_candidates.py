"""Which mixtures of experts the Triton kernels take, and the words in which they refuse."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from gpu_specs import gpu_spec
from twofold.kernels.kernel_set import KernelSet
from twofold.kernels.problems import MoeRouteProblem

ROUTE = MoeRouteProblem(num_experts=256, top_k=8, dtype=torch.float32)


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
