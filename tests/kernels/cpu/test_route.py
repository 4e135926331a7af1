"""The choice of experts in C against the reference in float64."""

from __future__ import annotations

import pytest
import torch
from twofold.kernels import reference
from twofold.kernels.cpu.library import unavailable
from twofold.kernels.cpu.route import moe_route

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=f"no compiled kernels: {unavailable()}")


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(0, 4, 2), (1, 5, 5), (9, 128, 8), (300, 60, 4), (3, 1, 1)])
def test_route(tokens, experts, top_k, renormalize):
    logits = torch.randn(tokens, experts + 3, generator=torch.Generator().manual_seed(experts))[:, 3:] * 4
    weights, ids = moe_route(logits, top_k, renormalize=renormalize)
    expected, places = reference.route(logits.double(), top_k, renormalize=renormalize)
    assert torch.equal(ids, places) and weights.dtype is torch.float32 and ids.dtype is torch.int32
    torch.testing.assert_close(weights, expected, atol=1e-6, rtol=2e-6)


def test_of_equal_scores_the_lower_id_leads_and_bad_numbers_give_experts():
    logits = torch.tensor([[1.0, 3.0, 3.0, 1.0, 3.0]])
    assert moe_route(logits, 4)[1].tolist() == [[1, 2, 4, 0]]
    for bad in (float("nan"), float("inf"), float("-inf")):
        ids = moe_route(torch.full((1, 6), bad), 3)[1][0].tolist()
        assert len(set(ids)) == 3 and all(0 <= expert < 6 for expert in ids)


def test_other_scorings_are_the_references():
    logits = torch.randn(4, 8)
    for options in ({"scoring": "sigmoid"}, {"num_groups": 2, "top_groups": 1}):
        got, wanted = moe_route(logits, 2, **options), reference.route(logits, 2, **options)
        assert torch.equal(got[0], wanted[0]) and torch.equal(got[1], wanted[1])
