"""``run_gated`` of every CPU kernel that has one: the bits of its product with the activation behind it."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch
from twofold.kernels.cases.case import ACTIVATIONS, Sizes, Source
from twofold.kernels.cases.products import CPU_SCHEMES, SCHEMES, AnyScheme, random_weight
from twofold.kernels.cpu.elementwise import gelu_and_mul, silu_and_mul
from twofold.kernels.cpu.library import unavailable
from twofold.kernels.kernel_set import default_registry
from twofold.kernels.problems import LinearProblem
from twofold.kernels.registry import Candidate
from twofold.platforms.cpu import CpuPlatform

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=f"no compiled kernels: {unavailable()}")

ACTIVATIONS_OF = {"silu": silu_and_mul, "gelu_pytorch_tanh": partial(gelu_and_mul, approximate="tanh")}
ROWS = (1, 64, 65, 300, 700)
COLUMNS = 96


def candidates(scheme: AnyScheme, rows: int) -> list[Candidate]:
    """Those that take a scheme, under any ``--cpu-activations``."""
    problem = LinearProblem(scheme=scheme, in_features=COLUMNS, out_features=rows, dtype=torch.float32)
    spec, found = CpuPlatform().spec, {}
    for how in ACTIVATIONS:
        for each in default_registry(spec, how).candidates("linear"):
            if each.run_gated and each.can_run(spec, problem) is None:
                found[each.name] = each
    return list(found.values())


def source_of(rows: int) -> Source:
    sizes = Sizes(out_features=rows, in_features=COLUMNS)
    return Source(torch.device("cpu"), torch.float32, sizes=sizes)


@pytest.mark.parametrize("inner", [32, 288, 50], ids=["one panel", "nine panels", "half a panel"])
@pytest.mark.parametrize("scheme", [*SCHEMES, *CPU_SCHEMES], ids=str)
def test_equals_the_activation_of_the_product(scheme: AnyScheme, inner: int) -> None:
    source = source_of(2 * inner)
    x, bias = source.randn(max(ROWS), COLUMNS), source.randn(2 * inner)
    weight, found = random_weight(source, scheme), candidates(scheme, 2 * inner)
    assert found
    for candidate in found:
        assert candidate.prepare is not None
        prepared = candidate.prepare(weight, torch.float32)
        for rows, added in itertools.product(ROWS, (None, bias)):
            plain = candidate.run(x[:rows], prepared, added)
            for name, run_gated in candidate.run_gated.items():
                result = run_gated(x[:rows], prepared, added)
                assert torch.equal(result, ACTIVATIONS_OF[name](plain)), (candidate.name, name, rows)
