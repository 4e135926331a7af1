"""One specialization that the ahead-of-time check compiles, and the names its modules share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

TYPE_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
CODE_NAMES = {torch.int8: "i8", torch.float8_e4m3fn: "fp8e4nv", torch.float8_e4m3fnuz: "fp8e4b8", **TYPE_NAMES}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One specialization. ``types`` of the run-time arguments that are neither pointers to ``x``'s dtype nor int32;
    ``ones`` names integers that are 1 in the smallest launches (one request, one row, one head): the JIT makes
    constants of them, and ``with_ones`` adds such a case. ``refused`` instead of a compilation when the launch table
    says why the registry will not choose it on this architecture. ``needs_matrix`` where the kernel has a ``tl.dot``
    of 16 or 8-bit inputs; ``in_subset`` for the part that continuous integration compiles (at least one per op)."""

    op: str
    variant: str
    kernel: Any = None
    types: dict[str, str] = field(default_factory=dict)
    constants: dict[str, Any] = field(default_factory=dict)
    options: dict[str, int] = field(default_factory=dict)
    ones: tuple[str, ...] = ()
    needs_matrix: bool = False
    in_subset: bool = False
    refused: str | None = None

    @property
    def name(self) -> str:
        return f"{self.op} {self.variant}"


def with_ones(cases: Iterable[Case]) -> Iterator[Case]:
    """The cases, and of the first in the subset of each kernel and phase another with every integer of ``ones`` 1."""
    seen = set()
    for case in cases:
        yield case
        kind = case.op, case.constants.get("ONE_TOKEN")
        if case.in_subset and case.ones and kind not in seen and case.refused is None:
            seen.add(kind)
            constants = {**case.constants, **dict.fromkeys(case.ones, 1)}
            yield replace(case, variant=f"{case.variant}, ones", constants=constants, in_subset=False)
