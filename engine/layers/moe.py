"""Mixture of experts: every token goes through the few feed-forward layers that a router chooses for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...kernels.kernel_set import KernelSet
from ...kernels.problems import ExpertLinearProblem, MoeRouteProblem, PlainProblem
from ...quant.canonical import CanonicalWeight
from .linear import Linear
from .mlp import GatedMLP


@dataclass(frozen=True, slots=True, eq=False)
class ExpertPart:
    """The prepared weights of all experts, and the kernel that reads them."""

    run: Callable[..., Tensor]
    prepared: Any


class ExpertLinear:
    """A linear layer that every expert has: x [T,K] or [T,k,K] -> [T,k,N], or summed over k -> [T,N].

    Several parts stand side by side along N, as in ``Linear``.
    """

    def __init__(self, parts: Sequence[ExpertPart]) -> None:
        self._parts = tuple(parts)

    def __call__(self, x: Tensor, expert_ids: Tensor, routing_weights: Tensor | None = None) -> Tensor:
        """``expert_ids`` int32 [T,k]; with ``routing_weights`` float32 [T,k] the experts' results are summed."""
        results = [part.run(x, part.prepared, expert_ids, routing_weights) for part in self._parts]
        return results[0] if len(results) == 1 else torch.cat(results, dim=-1)


class SharedExpert:
    """An expert for every token, times the sigmoid of a gate [1,K]."""

    def __init__(self, mlp: GatedMLP, gate: Linear, dtype: torch.dtype, kernels: KernelSet) -> None:
        self._mlp = mlp
        self._gate = gate
        self._scale = kernels.select_fused("sigmoid_gate", PlainProblem(dtype))

    def __call__(self, x: Tensor) -> Tensor:
        mixed, gates = self._mlp(x), self._gate(x)
        return mixed.mul_(torch.sigmoid(gates)) if self._scale is None else self._scale(mixed, gates)


class MixtureOfExperts:
    """``router`` [E,K], experts of ``gate_up`` [2I,K] and ``down`` [K,I]; ``renormalize`` as in ``reference.route``."""

    def __init__(
        self,
        router: Linear,
        gate_up: ExpertLinear,
        down: ExpertLinear,
        activation: Callable[[Tensor], Tensor],
        problem: MoeRouteProblem,
        kernels: KernelSet,
        *,
        renormalize: bool,
        shared: SharedExpert | None = None,
    ) -> None:
        self._router = router
        self._gate_up = gate_up
        self._down = down
        self._activation = activation
        self._top_k = problem.top_k
        self._renormalize = renormalize
        self._route = kernels.select("moe_route", problem)
        self._shared = shared

    def __call__(self, x: Tensor) -> Tensor:
        weights, expert_ids = self._route(self._router(x), self._top_k, renormalize=self._renormalize)
        gate_up = self._gate_up(x, expert_ids)
        inner = self._activation(gate_up.flatten(0, 1)).unflatten(0, gate_up.shape[:2])
        mixed = self._down(inner, expert_ids, weights)
        return mixed if self._shared is None else mixed.add_(self._shared(x))


def prepare_experts(
    weights: Sequence[CanonicalWeight], top_k: int, dtype: torch.dtype, kernels: KernelSet
) -> tuple[ExpertPart, ExpertLinearProblem]:
    """Choose the kernel for the weights of all experts, which have one scheme, and bring them into its layout."""
    out_features, in_features = weights[0].shape
    problem = ExpertLinearProblem(
        scheme=weights[0].scheme,
        num_experts=len(weights),
        top_k=top_k,
        in_features=in_features,
        out_features=out_features,
        dtype=dtype,
    )
    candidate = kernels.select_candidate("expert_linear", problem)
    assert candidate.prepare is not None, f"expert_linear candidate {candidate.name} has no prepare"
    return ExpertPart(candidate.run, candidate.prepare(weights, dtype)), problem
