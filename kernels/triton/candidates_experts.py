"""Mixtures of experts: routing, and the products with the experts' weights."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

from ...platforms.spec import DeviceSpec
from ...quant.scheme import Dense, Offset, WeightOnly
from ..expert_loop import as_experts, expert_bytes
from ..problems import ExpertLinearProblem, MoeRouteProblem
from ..registry import Candidate, Registry
from .candidate_rules import Lazy, triton_candidate, why_no_matrix, why_not_here
from .launch_experts import dense_row
from .launch_table import Refused, linear_row

MAX_EXPERTS = 512
MAX_TOP_K = 16
PACKED_BITS = (2, 3, 4, 8)
# Linear candidates for 8-bit weights whose product the experts share.
SCALED = ("triton_8bit", "triton_fp8_weights", "triton_fp8_emulated")
# One of each shape class.
_ROWS_PER_EXPERT = (1, 64, 256)


def register_expert_ops(registry: Registry) -> None:
    """Append the candidates for mixtures of experts."""
    registry.register(triton_candidate("moe_route", can_route, Lazy("moe_route", "route")))
    run, prepare = Lazy("experts", "expert_linear"), Lazy("experts", "prepare")
    linear = triton_candidate("expert_linear", can_run_experts, run, prepare)
    registry.register(replace(linear, prepared_bytes=prepared_bytes))
    for one in registry.candidates("linear"):
        if one.name in SCALED:
            registry.register(_scaled(one))


def _scaled(one: Candidate) -> Candidate:
    """The experts' candidate of a linear one for 8-bit weights."""
    return Candidate(
        op="expert_linear",
        name=one.name,
        quality=one.quality,
        can_run=_can_run_scaled(one),
        run=Lazy("experts", "expert_linear"),
        prepare=functools.partial(Lazy("expert_scaled", "prepare"), one.prepare),
        prepared_bytes=expert_bytes(one),
    )


def can_route(spec: DeviceSpec, problem: MoeRouteProblem) -> str | None:
    """Routing: up to ``MAX_EXPERTS`` experts and ``MAX_TOP_K`` choices."""
    if problem.num_experts > MAX_EXPERTS:
        return f"{problem.num_experts} experts; a token's scores fit its lanes up to {MAX_EXPERTS}"
    if problem.top_k > MAX_TOP_K:
        return f"{problem.top_k} experts per token; it chooses at most {MAX_TOP_K}"
    return why_not_here(spec, problem.dtype)


def can_run_experts(spec: DeviceSpec, problem: ExpertLinearProblem) -> str | None:
    """Products with experts: dense and weight-only schemes."""
    reason = why_not_here(spec, problem.dtype) or why_no_matrix(spec, problem.dtype)
    reason = reason or _too_many(problem)
    if reason is not None:
        return reason
    scheme, size = problem.scheme, problem.dtype.itemsize
    if isinstance(scheme, Dense):
        rows = [dense_row(spec.arch, count, size) for count in _ROWS_PER_EXPERT]
    elif isinstance(scheme, WeightOnly | Offset):
        if scheme.bits not in PACKED_BITS:
            return f"{scheme.bits} bits; the packed experts take {', '.join(map(str, PACKED_BITS))}"
        rows = [linear_row(spec.arch, count, size) for count in _ROWS_PER_EXPERT]
    else:
        return f"the experts are {scheme}; it takes dense and weight-only quantized ones"
    return next((row.reason for row in rows if isinstance(row, Refused)), None)


def _can_run_scaled(one: Candidate) -> Callable[[DeviceSpec, ExpertLinearProblem], str | None]:
    can_run = as_experts(one)
    return lambda spec, problem: can_run(spec, problem) or _too_many(problem)


def _too_many(problem: ExpertLinearProblem) -> str | None:
    if problem.num_experts <= MAX_EXPERTS:
        return None
    return f"{problem.num_experts} experts; their counts fit one program up to {MAX_EXPERTS}"


def prepared_bytes(problem: ExpertLinearProblem, stored: int) -> int:
    """Dense experts are kept in the activations' dtype, quantized ones as they are stored."""
    if not isinstance(problem.scheme, Dense):
        return stored
    return problem.num_experts * problem.out_features * problem.in_features * problem.dtype.itemsize
