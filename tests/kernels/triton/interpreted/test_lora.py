"""LoRA's products in the interpreter against sums row by row in float64, and against themselves in other company."""

from __future__ import annotations

import pytest
import torch
from lora_cases import make_lora_case
from tolerance import assert_near
from twofold.kernels.triton.lora import lora_expand, lora_shrink


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("ids", "rank", "in_features", "out_features"),
    [
        ([1], 8, 144, 100),
        ([0, 2, -1, 2, 1, 0, -1, 2], 40, 1000, 70),
        ([0] * 19 + [1] * 3, 16, 1100, 65),
        ([-1, -1, -1], 1, 64, 16),
    ],
)
def test_shrink_and_expand(dtype: torch.dtype, ids: list[int], rank: int, in_features: int, out_features: int) -> None:
    case = make_lora_case(ids, 3, rank, in_features, out_features, dtype)
    y = lora_shrink(case.x, case.a, case.ids)
    assert y.dtype is torch.float32
    torch.testing.assert_close(y.double(), case.shrunk(), atol=1e-4, rtol=1e-4)
    out = case.out.clone()
    lora_expand(y, case.b, case.ids, out, case.scales)
    assert_near(out, case.expanded(y.to(dtype)), factor=4.0)
    assert torch.equal(out[case.ids < 0], case.out[case.ids < 0])


def test_a_row_does_not_depend_on_its_company() -> None:
    """Alone its K is summed in parts by several programs, in company by one; a few adapters or many."""
    case = make_lora_case([0, 1, 2, 0, 1] * 9, 3, 24, 1100, 40, torch.bfloat16)
    together = lora_shrink(case.x, case.a, case.ids)
    out = case.out.clone()
    lora_expand(together, case.b, case.ids, out, case.scales)
    for row in (0, 4, 44):
        one = slice(row, row + 1)
        alone = lora_shrink(case.x[one], case.a, case.ids[one])
        assert torch.equal(alone[0], together[row])
        single = case.out[one].clone()
        lora_expand(alone, case.b, case.ids[one], single, case.scales)
        assert torch.equal(single[0], out[row])


def test_no_rows() -> None:
    case = make_lora_case([], 2, 8, 32, 16, torch.float32)
    assert lora_shrink(case.x, case.a, case.ids).shape == (0, 8)
    lora_expand(torch.zeros(0, 8), case.b, case.ids, case.out, case.scales)
