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
    uneven = replace(ATTENTION, num_heads=71)
    assert "71 query heads do not share 8" in refusal(gpu_spec("sm_90"), "paged_attention", uneven)
    assert "256 registers" in refusal(gpu_spec("gfx1100"), "paged_attention", replace(ATTENTION, head_size=256))
    assert "5 bits" in refusal(gpu_spec("sm_90"), "linear", replace(LINEAR, scheme=WeightOnly(5, 128)))
    assert "dense" in refusal(gpu_spec("sm_90"), "linear", replace(LINEAR, scheme=Dense()))


FP8 = {"sm_90": torch.float8_e4m3fn, "gfx942": torch.float8_e4m3fnuz, "gfx950": torch.float8_e4m3fn}


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "gfx90a", "gfx942", "gfx950", "gfx1100"])
@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.float8_e4m3fn, torch.float8_e4m3fnuz], ids=str)
def test_caches_of_8_bits_are_int8_and_the_devices_own_float(arch: str, kv_dtype: torch.dtype) -> None:
    attention = replace(ATTENTION, kv_dtype=kv_dtype)
    write = KVWriteProblem(dtype=torch.bfloat16, kv_dtype=kv_dtype)
    kernels = KernelSet(gpu_spec(arch))
    if kv_dtype in (torch.int8, FP8.get(arch)):
        assert kernels.select_candidate("paged_attention", attention).name == "triton"
        assert kernels.select_candidate("write_kv", write).name == "triton"
        assert kernels.select_fused("rope_write_kv", write) is not None
    else:
        assert "8-bit float" in refusal(gpu_spec(arch), "paged_attention", attention)
        assert "8-bit float" in refusal(gpu_spec(arch), "write_kv", write)
        assert kernels.select_fused("rope_write_kv", write) is None


@pytest.mark.parametrize("arch", ["sm_90", "gfx942"])
def test_what_else_attention_takes(arch: str) -> None:
    latent = {"num_heads": 128, "num_kv_heads": 1, "head_size": 576, "value_head_size": 512}
    for change in (
        {"has_sinks": True, "has_alibi": True, "sliding_window": 128, "soft_cap": 30.0},
        {"num_heads": 71, "num_kv_heads": 1},
        {"head_size": 192, "value_head_size": 128},
        latent,
        {**latent, "kv_dtype": torch.int8},
    ):
        problem = replace(ATTENTION, **change)
        assert KernelSet(gpu_spec(arch)).select_candidate("paged_attention", problem).name == "triton"
    single = replace(ATTENTION, **latent, dtype=torch.float32, kv_dtype=torch.float32)
    assert "16-bit queries alone" in refusal(gpu_spec(arch), "paged_attention", single)
    wide = replace(ATTENTION, **{**latent, "value_head_size": 576})
    assert "head size 576" in refusal(gpu_spec(arch), "paged_attention", wide)


def test_importing_the_kernels_leaves_triton_alone() -> None:
    code = "import sys, twofold.kernels.kernel_set; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
