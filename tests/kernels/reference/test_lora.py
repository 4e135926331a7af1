"""LoRA's definition against sums row by row in float64."""

from __future__ import annotations

import pytest
import torch
from lora_cases import make_lora_case
from twofold.kernels.kernel_set import KernelSet
from twofold.kernels.problems import LoraProblem
from twofold.kernels.reference import lora_expand, lora_shrink
from twofold.platforms.cpu import CpuPlatform


@pytest.mark.parametrize("ids", [[0], [2, -1, 0, 1, 2], [-1, -1], []])
@pytest.mark.parametrize("rank", [1, 8])
def test_rows_get_their_own_adapter(ids: list[int], rank: int) -> None:
    case = make_lora_case(ids, 3, rank, 20, 13, torch.float32)
    y = lora_shrink(case.x, case.a, case.ids)
    torch.testing.assert_close(y.double(), case.shrunk(), atol=1e-5, rtol=1e-5)
    out = case.out.clone()
    lora_expand(y, case.b, case.ids, out, case.scales)
    torch.testing.assert_close(out.double(), case.expanded(y), atol=1e-5, rtol=1e-5)
    none = case.ids < 0
    assert torch.equal(out[none], case.out[none])


def test_the_registry_has_it_on_the_cpu() -> None:
    kernels = KernelSet(CpuPlatform().spec, strict=True)
    problem = LoraProblem(rank=8, in_features=20, out_features=13, dtype=torch.float32)
    assert kernels.select("lora_shrink", problem) is lora_shrink
    assert kernels.select("lora_expand", problem) is lora_expand
