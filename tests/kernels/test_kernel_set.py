from __future__ import annotations

import pytest
import torch
from twofold.errors import UnsupportedError
from twofold.kernels.kernel_set import KernelSet
from twofold.kernels.problems import AttentionProblem, KVWriteProblem, LinearProblem, PlainProblem
from twofold.kernels.registry import Candidate, Quality, Registry
from twofold.platforms.spec import DeviceSpec
from twofold.quant.canonical import DenseWeight, PackedWeight, dequantize, pack
from twofold.quant.scheme import Dense, WeightOnly

OPS = ["rms_norm", "add_rms_norm", "rope", "silu_and_mul", "gelu_and_mul", "copy_blocks"]


def spec(device_type: str = "cpu") -> DeviceSpec:
    return DeviceSpec(
        vendor="test",
        arch="test",
        name="test",
        device_type=device_type,
        wave_size=1,
        shared_memory_per_block=0,
        num_cores=1,
    )


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
@pytest.mark.parametrize("op", OPS)
def test_every_op_has_a_kernel_everywhere(op, device_type):
    assert callable(KernelSet(spec(device_type)).select(op, PlainProblem(torch.bfloat16)))


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_cache_writes_have_a_kernel_everywhere(device_type):
    problem = KVWriteProblem(dtype=torch.bfloat16, kv_dtype=torch.bfloat16)
    assert callable(KernelSet(spec(device_type)).select("write_kv", problem))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dense_and_packed_linear(dtype):
    kernels = KernelSet(spec())
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 64, generator=generator).to(dtype)
    codes = torch.randint(0, 16, (10, 64), generator=generator)
    scheme = WeightOnly(4, 32, True, False)
    packed = PackedWeight(scheme, (10, 64), pack(codes, 4), torch.rand(10, 2, generator=generator))
    for weight, kind in ((DenseWeight(torch.randn(10, 64, generator=generator)), Dense()), (packed, scheme)):
        candidate = kernels.select_candidate(
            "linear", LinearProblem(scheme=kind, in_features=64, out_features=10, dtype=dtype)
        )
        bias = torch.randn(10, generator=generator).to(dtype)
        result = candidate.run(x, candidate.prepare(weight, dtype), bias)
        expected = x.double() @ dequantize(weight, torch.float64).T + bias.double()
        tolerance = 1e-5 if dtype is torch.float32 else 0.1
        torch.testing.assert_close(result.double(), expected, atol=tolerance, rtol=tolerance)


def test_a_problem_is_chosen_once_and_reported_with_its_refusals():
    asked = []
    registry = Registry()

    def refuse(device, problem):
        asked.append(problem)
        return "needs a longer beard"

    registry.register(Candidate(op="op", name="best", quality=Quality.NATIVE, can_run=refuse, run=min))
    registry.register(Candidate(op="op", name="plain", quality=Quality.REFERENCE, can_run=lambda *_: None, run=max))
    kernels = KernelSet(spec(), registry=registry)
    problem = PlainProblem(torch.float32)
    assert kernels.select("op", problem) is max
    assert kernels.select("op", PlainProblem(torch.float32)) is max
    assert asked == [problem]
    assert kernels.report() == [
        {
            "op": "op",
            "problem": "float32",
            "kernel": "plain",
            "quality": "reference",
            "refused": "best: needs a longer beard",
        }
    ]
    with pytest.raises(UnsupportedError, match="needs a longer beard"):
        KernelSet(spec(), strict=True, registry=registry).select("op", problem)
    with pytest.raises(UnsupportedError, match="no candidate is registered"):
        kernels.select("unheard", problem)


def test_problems_print_short():
    attention = AttentionProblem(
        num_heads=9,
        num_kv_heads=3,
        head_size=64,
        block_size=16,
        dtype=torch.float32,
        kv_dtype=torch.bfloat16,
        sliding_window=5,
    )
    assert str(attention) == "9/3 heads of 64, blocks of 16, float32, cache bfloat16, window 5"
    linear = LinearProblem(scheme=WeightOnly(4, 32, True, False), in_features=64, out_features=10, dtype=torch.float16)
    assert str(linear) == "10x64 w4g32 sym float16"
