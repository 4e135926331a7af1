"""Which problems the Triton kernels take on which device, and the words in which they refuse."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from gpu_specs import gpu_spec
from twofold.kernels.kernel_set import KernelSet
from twofold.kernels.problems import AttentionProblem, KVWriteProblem, LinearProblem, PlainProblem
from twofold.platforms.spec import DeviceSpec
from twofold.quant.scheme import Dense, WeightOnly

ATTENTION = AttentionProblem(
    num_heads=32, num_kv_heads=8, head_size=128, block_size=16, dtype=torch.bfloat16, kv_dtype=torch.bfloat16
)
LINEAR = LinearProblem(scheme=WeightOnly(4, 128), in_features=4096, out_features=1000, dtype=torch.bfloat16)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_120", "gfx90a", "gfx942", "gfx1100", "gfx1201"])
def test_gpus_of_both_vendors_get_native_kernels_for_every_hot_op(arch: str) -> None:
    kernels = KernelSet(gpu_spec(arch), strict=True)
    for op in ("rms_norm", "add_rms_norm", "rope", "silu_and_mul", "gelu_and_mul"):
        assert kernels.select_candidate(op, PlainProblem(torch.bfloat16)).name == "triton"
    writes = KVWriteProblem(dtype=torch.bfloat16, kv_dtype=torch.bfloat16)
    assert kernels.select_candidate("write_kv", writes).name == "triton"
    assert kernels.select_candidate("paged_attention", ATTENTION).name == "triton"
    assert kernels.select_candidate("linear", LINEAR).name == "triton"


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", [-1, 32, 36])
def test_weight_only_schemes(bits: int, symmetric: bool, group_size: int) -> None:
    problem = replace(LINEAR, scheme=WeightOnly(bits, group_size, symmetric))
    assert KernelSet(gpu_spec("gfx942")).select_candidate("linear", problem).name == "triton"


def refusal(spec: DeviceSpec, op: str, problem: object) -> str:
    kernels = KernelSet(spec)
    assert kernels.select_candidate(op, problem).name.startswith("torch")
    return next(row["refused"] for row in kernels.report())


def test_refusals_say_why() -> None:
    missing = gpu_spec("sm_90", has_triton=False)
    assert "triton: triton is not installed" in refusal(missing, "paged_attention", ATTENTION)
    assert "no Triton kernel for float64" in refusal(gpu_spec("sm_90"), "rms_norm", PlainProblem(torch.float64))
    assert "sm_75 has no bfloat16 matrix" in refusal(gpu_spec("sm_75"), "linear", LINEAR)
    assert "head size 512" in refusal(gpu_spec("sm_90"), "paged_attention", replace(ATTENTION, head_size=512))
    many = replace(ATTENTION, num_heads=71, num_kv_heads=1)
    assert "71 query heads over 1 KV heads" in refusal(gpu_spec("sm_90"), "paged_attention", many)
    assert "256 registers" in refusal(gpu_spec("gfx1100"), "paged_attention", replace(ATTENTION, head_size=256))
    assert "5 bits" in refusal(gpu_spec("sm_90"), "linear", replace(LINEAR, scheme=WeightOnly(5, 128)))
    assert "dense" in refusal(gpu_spec("sm_90"), "linear", replace(LINEAR, scheme=Dense()))


def test_importing_the_kernels_leaves_triton_alone() -> None:
    code = "import sys, twofold.kernels.kernel_set; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
