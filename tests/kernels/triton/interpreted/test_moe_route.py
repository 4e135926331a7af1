"""Routing against its definition, alignment against a plain sort."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from twofold.kernels import reference
from twofold.kernels.triton.moe_align import align, max_blocks
from twofold.kernels.triton.moe_route import route

SETTINGS: list[dict[str, Any]] = [
    {"renormalize": False},
    {"renormalize": True, "scaling": 2.5},
    {"scoring": "sigmoid", "renormalize": True, "bias": True},
    {"renormalize": False, "num_groups": 8, "top_groups": 3, "scaling": 16.0},
    {"scoring": "sigmoid", "num_groups": 8, "top_groups": 4, "group_score": "top2_sum", "bias": True, "scaling": 2.5},
]


def check_route(tokens: int, experts: int, top_k: int, dtype: torch.dtype, seed: int = 0, **settings: Any) -> None:
    """The kernel's choice is the definition's. Logits are distinct steps apart, so that rounding decides nothing."""
    generator = torch.Generator().manual_seed(seed)
    steps = torch.stack([torch.randperm(experts, generator=generator) for _ in range(tokens)])
    logits = (steps.float() * (8.0 / experts) - 4.0).to(dtype)
    bias = torch.randn(experts, generator=generator) if settings.pop("bias", False) else None
    weights, ids = route(logits, top_k, bias=bias, **settings)
    wanted, experts_wanted = reference.route(logits.double(), top_k, bias=bias, **settings)
    assert torch.equal(ids, experts_wanted)
    torch.testing.assert_close(weights, wanted, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda row: ", ".join(f"{k} {v}" for k, v in row.items()))
@pytest.mark.parametrize(("experts", "top_k"), [(8, 2), (160, 6), (256, 8)])
def test_settings(settings: dict[str, Any], experts: int, top_k: int) -> None:
    check_route(3, experts, top_k, torch.float32, **settings)


@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1, 1, 1), (1, 2, 2), (5, 60, 4), (2, 512, 16), (70, 8, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_sizes(tokens: int, experts: int, top_k: int, dtype: torch.dtype) -> None:
    if dtype is torch.bfloat16 and experts > 64:
        pytest.skip("bfloat16 has too few steps for so many distinct logits")
    check_route(tokens, experts, top_k, dtype)


def test_equal_logits_go_to_the_lower_ids_and_no_number_wins_nothing() -> None:
    logits = torch.zeros(2, 12)
    logits[1, 3] = float("nan")
    assert route(logits, 4, scoring="sigmoid")[1].tolist() == [[0, 1, 2, 3], [0, 1, 2, 4]]
    assert route(torch.full((1, 12), float("nan")), 12)[1].tolist() == [list(range(12))]
    assert route(torch.zeros(0, 12), 4)[1].shape == (0, 4)


def test_rows_do_not_see_their_neighbours() -> None:
    logits = torch.randn(40, 24, generator=torch.Generator().manual_seed(2))
    weights, ids = route(logits, 3)
    for row in (0, 13, 39):
        alone = route(logits[row : row + 1], 3)
        assert torch.equal(alone[0][0], weights[row]) and torch.equal(alone[1][0], ids[row])


def check_alignment(ids: torch.Tensor, num_experts: int, block_m: int) -> None:
    """Blocks of one expert each, in order, that hold every choice once; the rest of the table is unused."""
    aligned = align(ids, num_experts, block_m)
    flat = ids.flatten().long()
    flat = torch.where((flat < 0) | (flat >= num_experts), num_experts, flat)
    assert aligned.order.tolist() == torch.argsort(flat, stable=True).tolist()
    wanted = []
    counts = torch.bincount(flat, minlength=num_experts + 1).tolist()
    first = 0
    for expert, count in enumerate(counts):
        wanted += [(expert, first + at, min(block_m, count - at)) for at in range(0, count, block_m)]
        first += count
    table = aligned.blocks.T.tolist()
    assert [tuple(row) for row in table[: len(wanted)]] == wanted
    assert all(row[0] == -1 for row in table[len(wanted) :])


@pytest.mark.parametrize("tokens", [1, 16, 17, 43, 200])
@pytest.mark.parametrize(("experts", "top_k", "block_m"), [(1, 1, 16), (8, 2, 16), (60, 4, 64), (300, 8, 16)])
def test_alignment(tokens: int, experts: int, top_k: int, block_m: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.stack([torch.randperm(experts, generator=generator)[:top_k] for _ in range(tokens)]).int()
    check_alignment(ids, experts, block_m)


def test_lopsided_alignment() -> None:
    check_alignment(torch.full((150, 2), 5, dtype=torch.int32), 8, 16)
    check_alignment(torch.full((9, 2), -1, dtype=torch.int32), 8, 16)
    check_alignment(torch.tensor([[0, -1], [7, 9], [-1, 0]], dtype=torch.int32), 8, 16)


def test_no_choice_needs_more_blocks() -> None:
    for seed in range(200):
        draw = random.Random(seed)
        experts, choices, block_m = draw.randint(1, 9), draw.randint(1, 60), draw.choice([1, 4, 16])
        counts = [0] * (experts + 1)
        for _ in range(choices):
            counts[draw.randint(0, draw.randint(0, experts))] += 1
        assert sum(-(-count // block_m) for count in counts) <= max_blocks(choices, experts, block_m)
    assert max_blocks(33, 2, 16) == 4 and max_blocks(2, 8, 16) == 2
