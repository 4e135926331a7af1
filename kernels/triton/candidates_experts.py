"""Mixtures of experts: routing, and the products with the experts' weights."""

from __future__ import annotations

from ...platforms.spec import DeviceSpec
from ..problems import MoeRouteProblem
from ..registry import Registry
from .candidate_rules import Lazy, triton_candidate, why_not_here

MAX_EXPERTS = 512
MAX_TOP_K = 16


def register_expert_ops(registry: Registry) -> None:
    """Append the candidates for mixtures of experts."""
    registry.register(triton_candidate("moe_route", can_route, Lazy("moe_route", "route")))


def can_route(spec: DeviceSpec, problem: MoeRouteProblem) -> str | None:
    """Routing: up to ``MAX_EXPERTS`` experts and ``MAX_TOP_K`` choices."""
    if problem.num_experts > MAX_EXPERTS:
        return f"{problem.num_experts} experts; a token's scores fit its lanes up to {MAX_EXPERTS}"
    if problem.top_k > MAX_TOP_K:
        return f"{problem.top_k} experts per token; it chooses at most {MAX_TOP_K}"
    return why_not_here(spec, problem.dtype)
