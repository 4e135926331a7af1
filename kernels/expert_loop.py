"""Experts one after the other: each linear candidate also serves mixtures of experts, in every scheme it knows.

The rows of a step are sorted by expert, and each expert that got some multiplies them with the linear kernel. Which
experts these are must be known on the host, so a GPU waits here: it is the last resort there. Where the kernel is C's,
one call serves all experts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..platforms.spec import DeviceSpec
from ..quant.canonical import CanonicalWeight
from .cpu import experts as cpu_experts
from .problems import ExpertLinearProblem, LinearProblem
from .registry import Candidate, Quality, Registry


@dataclass(frozen=True, slots=True, eq=False)
class LoopedExperts:
    """What the linear candidate prepared for each expert; ``out_features`` is N."""

    weights: list[Any]
    out_features: int


# Linear candidates whose panels the C kernel reads for all experts at once.
IN_C = (
    "c_bf16",
    "c_dense_float32",
    "c_int8_activations",
    "c_low_bit_float32",
    "c_low_bit_rounded",
    "c_small_floats",
    "c_dense_dequantized",
)


def register_expert_loops(registry: Registry, spec: DeviceSpec) -> None:
    """Append an ``expert_linear`` candidate for every linear one registered so far that has none, in their order."""
    taken = {candidate.name for candidate in registry.candidates("expert_linear")}
    for linear in registry.candidates("linear"):
        if linear.name not in taken:
            registry.register(_candidate(linear, spec))


def _candidate(linear: Candidate, spec: DeviceSpec) -> Candidate:
    loop = Candidate(
        op="expert_linear",
        name=f"loop_{linear.name}",
        quality=linear.quality if spec.device_type == "cpu" else Quality.REFERENCE,
        can_run=as_experts(linear),
        run=_run(linear),
        prepare=_prepare(linear),
        own_threads=linear.own_threads,
        prepared_bytes=expert_bytes(linear),
        shares_dense=linear.shares_dense,
    )
    assert linear.prepare is not None, f"linear candidate {linear.name} prepares no weight"
    if linear.name in IN_C:
        prepare = functools.partial(cpu_experts.prepare, linear.prepare)
        return replace(loop, name=linear.name, prepare=prepare, run=cpu_experts.expert_linear)
    return loop


def linear_problem(problem: ExpertLinearProblem) -> LinearProblem:
    """The product with one expert."""
    return LinearProblem(
        scheme=problem.scheme,
        in_features=problem.in_features,
        out_features=problem.out_features,
        dtype=problem.dtype,
    )


def sort_by_expert(expert_ids: Tensor, num_experts: int) -> tuple[Tensor, list[int]]:
    """The choices (t * k + j) sorted by expert, and where each expert's begin, [E+1]; ids of -1 come before all."""
    flat = expert_ids.reshape(-1)
    starts = torch.bincount(flat + 1, minlength=num_experts + 1).cumsum(0).tolist()
    assert len(starts) == num_experts + 1, f"an expert id is beyond the {num_experts} experts"
    return torch.argsort(flat, stable=True), starts


def weighted_sum(rows: Tensor, routing_weights: Tensor | None) -> Tensor:
    """rows [T,k,N], or with ``routing_weights`` [T,k] their sum over k in float32 and in the order of k, [T,N]."""
    if routing_weights is None:
        return rows
    total = rows[:, 0].float() * routing_weights[:, :1]
    for choice in range(1, rows.shape[1]):
        total.addcmul_(rows[:, choice].float(), routing_weights[:, choice : choice + 1])
    return total.to(rows.dtype)


def as_experts(linear: Candidate) -> Callable[[DeviceSpec, ExpertLinearProblem], str | None]:
    """``can_run`` of experts for which a linear candidate can run one."""
    return lambda spec, problem: linear.can_run(spec, linear_problem(problem))


def _prepare(linear: Candidate) -> Callable[..., Any]:
    prepare = linear.prepare
    assert prepare is not None, f"linear candidate {linear.name} prepares no weight"

    def prepare_each(weights: Sequence[CanonicalWeight], dtype: torch.dtype) -> LoopedExperts:
        return LoopedExperts([prepare(weight, dtype) for weight in weights], weights[0].shape[0])

    return prepare_each


def expert_bytes(linear: Candidate) -> Callable[[ExpertLinearProblem, int], int] | None:
    """``prepared_bytes`` of experts that a linear candidate prepared one by one; None as its own."""
    each = linear.prepared_bytes
    if each is None:
        return None
    return lambda problem, stored: problem.num_experts * each(linear_problem(problem), stored // problem.num_experts)


def _run(linear: Candidate) -> Callable[..., Tensor]:
    def run(x: Tensor, experts: LoopedExperts, expert_ids: Tensor, routing_weights: Tensor | None = None) -> Tensor:
        tokens, top_k = expert_ids.shape
        order, starts = sort_by_expert(expert_ids, len(experts.weights))
        inputs = x.reshape(-1, x.shape[-1])[order if x.dim() == 3 else order // top_k]
        rows = x.new_zeros(tokens * top_k, experts.out_features)
        for weight, start, end in zip(experts.weights, starts, starts[1:], strict=False):
            if end > start:
                rows[order[start:end]] = linear.run(inputs[start:end], weight, None)
        return weighted_sum(rows.view(tokens, top_k, experts.out_features), routing_weights)

    return run
