"""The LoRA products as candidates of the registry."""

from __future__ import annotations

from ...platforms.spec import DeviceSpec
from ..problems import LoraProblem
from ..registry import Registry
from .candidate_rules import Lazy, triton_candidate, why_no_matrix, why_not_here

MAX_RANK = 256


def register_lora_ops(registry: Registry) -> None:
    """Append the Triton candidates of both products."""
    for op in ("lora_shrink", "lora_expand"):
        registry.register(triton_candidate(op, can_run_lora, Lazy("lora", op)))


def can_run_lora(spec: DeviceSpec, problem: LoraProblem) -> str | None:
    """Ranks up to 256 on chips with matrix instructions."""
    if not 1 <= problem.rank <= MAX_RANK:
        return f"rank {problem.rank} is not between 1 and {MAX_RANK}"
    return why_not_here(spec, problem.dtype) or why_no_matrix(spec, problem.dtype)
