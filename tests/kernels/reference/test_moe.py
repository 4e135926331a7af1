"""The definitions of expert choice and of the experts' product, against transformers' routers and plain float64."""

from __future__ import annotations

import pytest
import torch
from transformers import DeepseekV2Config, DeepseekV3Config, MixtralConfig, Qwen3MoeConfig
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter
from twofold.kernels.reference import expert_linear, route

TOKENS, EXPERTS, HIDDEN = 50, 16, 32


def logits_of(router: torch.nn.Module, seed: int = 0) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """Router logits for random hidden states, and the (weights, experts) that the router itself chose."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        router.weight.copy_(torch.randn(EXPERTS, HIDDEN, generator=random))
        if hasattr(router, "e_score_correction_bias"):
            router.e_score_correction_bias.copy_(torch.randn(EXPERTS, generator=random))
        hidden = torch.randn(TOKENS, HIDDEN, generator=random)
        logits = torch.nn.functional.linear(hidden, router.weight)
        _, weights, experts = router(hidden)
    return logits, (weights, experts)


def assert_same_choice(ours: tuple[torch.Tensor, torch.Tensor], theirs: tuple[torch.Tensor, torch.Tensor]) -> None:
    """The same experts with the same weights, in whatever order of the experts."""
    spread = [torch.zeros(TOKENS, EXPERTS).scatter(1, ids.long(), weights) for weights, ids in (ours, theirs)]
    assert ours[1].dtype is torch.int32 and ours[0].dtype is torch.float32
    torch.testing.assert_close(spread[0], spread[1], rtol=1e-5, atol=1e-7)


def test_mixtral() -> None:
    router = MixtralTopKRouter(MixtralConfig(hidden_size=HIDDEN, num_local_experts=EXPERTS, num_experts_per_tok=2))
    logits, theirs = logits_of(router)
    assert_same_choice(route(logits, 2), theirs)


@pytest.mark.parametrize("renormalize", [True, False])
def test_qwen3_moe(renormalize: bool) -> None:
    config = Qwen3MoeConfig(hidden_size=HIDDEN, num_experts=EXPERTS, num_experts_per_tok=4, norm_topk_prob=renormalize)
    logits, theirs = logits_of(Qwen3MoeTopKRouter(config))
    assert_same_choice(route(logits, 4, renormalize=renormalize), theirs)


@pytest.mark.parametrize("method", ["greedy", "group_limited_greedy"])
def test_deepseek_v2(method: str) -> None:
    config = DeepseekV2Config(
        hidden_size=HIDDEN,
        n_routed_experts=EXPERTS,
        num_experts_per_tok=4,
        n_group=4,
        topk_group=2,
        topk_method=method,
        routed_scaling_factor=16.0,
    )
    logits, theirs = logits_of(DeepseekV2TopkRouter(config))
    groups = {"num_groups": 4, "top_groups": 2} if method == "group_limited_greedy" else {}
    assert_same_choice(route(logits, 4, renormalize=False, scaling=16.0, **groups), theirs)


@pytest.mark.parametrize("renormalize", [True, False])
def test_deepseek_v3(renormalize: bool) -> None:
    config = DeepseekV3Config(
        hidden_size=HIDDEN,
        n_routed_experts=EXPERTS,
        num_experts_per_tok=4,
        n_group=4,
        topk_group=2,
        norm_topk_prob=renormalize,
        routed_scaling_factor=2.5,
    )
    router = DeepseekV3TopkRouter(config)
    logits, theirs = logits_of(router)
    ours = route(
        logits,
        4,
        scoring="sigmoid",
        renormalize=renormalize,
        num_groups=4,
        top_groups=2,
        bias=router.e_score_correction_bias,
        scaling=2.5,
        group_score="top2_sum",
    )
    assert_same_choice(ours, theirs)


def test_best_first_and_lower_ids_of_equal_ones() -> None:
    weights, ids = route(torch.tensor([[0.0, 2.0, 1.0, 2.0, 0.0]]), 4, renormalize=False)
    assert ids.tolist() == [[1, 3, 2, 0]]
    assert weights[0, 0] == weights[0, 1] > weights[0, 2] > weights[0, 3]


@pytest.mark.parametrize("own_rows", [False, True])
def test_expert_linear(own_rows: bool) -> None:
    random = torch.Generator().manual_seed(1)
    weights = torch.randn(5, 7, 9, generator=random)
    ids = torch.tensor([[0, 4], [4, -1], [2, 3]], dtype=torch.int32)
    x = torch.randn(3, 2, 9, generator=random) if own_rows else torch.randn(3, 9, generator=random)
    routing = torch.rand(3, 2, generator=random)
    expected = torch.zeros(3, 2, 7, dtype=torch.float64)
    for t in range(3):
        for j in range(2):
            if ids[t, j] >= 0:
                row = x[t, j] if own_rows else x[t]
                expected[t, j] = weights[ids[t, j]].double() @ row.double()
    torch.testing.assert_close(expert_linear(x, weights, ids).double(), expected, rtol=1e-5, atol=1e-5)
    total = (expected * routing.double()[..., None]).sum(1)
    torch.testing.assert_close(expert_linear(x, weights, ids, routing).double(), total, rtol=1e-5, atol=1e-5)
