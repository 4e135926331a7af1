"""``run_gated`` of every CPU kernel that has one: the bits of its product with the activation behind it."""

from __future__ import annotations

import pytest
import torch
from twofold.kernels.cases.case import ACTIVATIONS, Sizes, Source
from twofold.kernels.cases.products import CPU_SCHEMES, SCHEMES, AnyScheme, random_weight
from twofold.kernels.cpu.elementwise import silu_and_mul
from twofold.kernels.cpu.library import unavailable
from twofold.kernels.kernel_set import default_registry
from twofold.kernels.problems import LinearProblem
from twofold.kernels.registry import Candidate
from twofold.platforms.cpu import CpuPlatform

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=f"no compiled kernels: {unavailable()}")

ROWS = (1, 64, 65, 300, 700)
COLUMNS = 96


def candidates(scheme: AnyScheme, rows: int) -> list[Candidate]:
    """Those that take a scheme, under any ``--cpu-activations``."""
    problem = LinearProblem(scheme=scheme, in_features=COLUMNS, out_features=rows, dtype=torch.float32)
    spec, found = CpuPlatform().spec, {}
    for how in ACTIVATIONS:
        for each in default_registry(spec, how).candidates("linear"):
            if each.run_gated is not None and each.can_run(spec, problem) is None:
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
        assert candidate.prepare is not None and candidate.run_gated is not None
        prepared = candidate.prepare(weight, torch.float32)
        for rows in ROWS:
            for added in (None, bias):
                wanted = silu_and_mul(candidate.run(x[:rows], prepared, added))
                assert torch.equal(candidate.run_gated(x[:rows], prepared, added), wanted), (candidate.name, rows)
