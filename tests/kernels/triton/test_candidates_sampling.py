"""Which sampling problems the Triton kernels take, and the words in which they refuse."""

from __future__ import annotations

import pytest
import torch
from gpu_specs import gpu_spec
from twofold.kernels.kernel_set import KernelSet
from twofold.kernels.problems import SamplingProblem

OPS = ("argmax", "draw_tokens", "edit_logits")


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("arch", ["sm_75", "sm_90", "gfx90a", "gfx1201"])
def test_gpus_of_both_vendors_sample_natively(arch: str, op: str) -> None:
    kernels = KernelSet(gpu_spec(arch), strict=True)
    assert kernels.select_candidate(op, SamplingProblem(vocab_size=151936)).name == "triton"


@pytest.mark.parametrize(
    ("problem", "has_triton", "reason"),
    [
        (SamplingProblem(vocab_size=1000), False, "triton is not installed"),
        (
            SamplingProblem(vocab_size=(1 << 22) + 1),
            True,
            "sums over 4194305 tokens may overflow; it takes up to 4194304",
        ),
        (SamplingProblem(vocab_size=1000, dtype=torch.float16), True, "float32 logits, not float16"),
    ],
)
def test_refusals_say_why(problem: SamplingProblem, has_triton: bool, reason: str) -> None:
    kernels = KernelSet(gpu_spec("sm_90", has_triton=has_triton))
    assert kernels.select_candidate("draw_tokens", problem).name == "torch"
    assert reason in kernels.report()[0]["refused"]
