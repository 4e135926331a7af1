"""Every registered kernel of a CPU against `kernels/reference`, at typical, random and ugly sizes."""

from __future__ import annotations

import random

import pytest
from twofold.cli.kernel_check import check_kernels
from twofold.kernels.cases import ACTIVATIONS, TYPICAL, Sizes
from twofold.kernels.cpu import linear_bf16
from twofold.kernels.cpu.library import unavailable
from twofold.kernels.kernel_set import default_registry
from twofold.platforms.cpu import CpuPlatform

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=f"no compiled kernels: {unavailable()}")

# Inputs in two planes are for sensitive layers, and experts are none: registered with all others, never chosen.
UNREACHABLE = {("expert_linear", "loop_c_int16_activations")}
UGLY = [
    Sizes(1, 1, 1, 1, 1, 2, 1, 1, 1, 1),
    Sizes(2, 31, 33, 3, 1, 5, 3, 37, 2, 2),
    Sizes(17, 129, 70, 6, 2, 20, 48, 257, 5, 1),
    Sizes(33, 160, 100, 5, 5, 33, 16, 1000, 9, 4),
]


def random_sizes(seed: int) -> Sizes:
    """Any rows, features that are often multiples of something, any heads."""
    draw = random.Random(seed)
    kv_heads, experts = draw.randint(1, 4), draw.randint(1, 6)
    return Sizes(
        num_tokens=draw.randint(1, 70),
        in_features=draw.randint(1, 20) * draw.choice((1, 8, 16, 32)),
        out_features=draw.randint(1, 200),
        num_heads=kv_heads * draw.randint(1, 9),
        num_kv_heads=kv_heads,
        head_size=draw.randint(2, 140),
        block_size=draw.choice((1, 4, 7, 16, 48)),
        vocab_size=draw.randint(1, 5000),
        num_experts=experts,
        top_k=draw.randint(1, experts),
    )


def test_every_kernel_has_a_case() -> None:
    """Where an engine could choose it. One that is registered without a case is named here."""
    rows = check_kernels(CpuPlatform())
    ran = {(row["op"], row["kernel"]) for row in rows if row["status"] in ("selected", "ready")}
    registered = set()
    for how in ACTIVATIONS:
        if how != "bf16" or linear_bf16.missing() is None:
            registry = default_registry(CpuPlatform().spec, how)
            registered |= {(op, each.name) for op in registry.ops() for each in registry.candidates(op)}
    assert registered - ran == UNREACHABLE


@pytest.mark.parametrize("sizes", [TYPICAL, *UGLY, *map(random_sizes, range(4))], ids=range(9))
def test_every_kernel_computes_its_definition(sizes: Sizes) -> None:
    rows = check_kernels(CpuPlatform(), sizes, seed=sizes.num_tokens)
    assert not [row for row in rows if row["status"] == "wrong"]
