"""Which LoRA problems the Triton kernels take, and the words in which they refuse."""

from __future__ import annotations

import pytest
import torch
from gpu_specs import gpu_spec
from twofold.kernels.kernel_set import KernelSet
from twofold.kernels.problems import LoraProblem


def problem(rank: int) -> LoraProblem:
    return LoraProblem(rank=rank, in_features=4096, out_features=1000, dtype=torch.bfloat16)


@pytest.mark.parametrize("op", ["lora_shrink", "lora_expand"])
@pytest.mark.parametrize("arch", ["sm_80", "sm_120", "gfx942", "gfx1100"])
@pytest.mark.parametrize("rank", [1, 16, 256])
def test_gpus_of_both_vendors_run_it_natively(arch: str, op: str, rank: int) -> None:
    assert KernelSet(gpu_spec(arch), strict=True).select_candidate(op, problem(rank)).name == "triton"


@pytest.mark.parametrize(
    ("arch", "rank", "reason"),
    [("sm_90", 257, "rank 257 is not between 1 and 256"), ("sm_75", 8, "sm_75 has no bfloat16")],
)
def test_refusals_say_why(arch: str, rank: int, reason: str) -> None:
    kernels = KernelSet(gpu_spec(arch))
    assert kernels.select_candidate("lora_shrink", problem(rank)).name == "torch"
    assert reason in kernels.report()[0]["refused"]
