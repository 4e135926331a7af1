"""Mixtures of experts: routing, and the products with dense, 4-bit and int8 experts."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ...quant.scheme import Activation, Dense, Element, Int8, WeightOnly, activation_of
from ..problems import ExpertLinearProblem, MoeRouteProblem
from ..registry import Candidate
from .linear import LinearScheme, random_weight
from .workload import Call, Inputs, ModelShapes, Step, Workload

# A row of x is gathered by every tile of outputs; what sorting the choices leaves is small and read by all programs.
CACHED = frozenset(
    {"x_ptr", "scales_ptr", "zeros_ptr", "perm_ptr", "ids_ptr", "order_ptr", "blocks_ptr", "counts_ptr", "totals_ptr"}
    | {"x_scale_ptr"}
)


def workloads(inputs: Inputs, model: ModelShapes, step: Step) -> Iterator[Workload]:
    """Routing and the gate-up product of a layer, with the choices that routing could make."""
    yield _route(inputs, model, step)
    for scheme in (Dense(), WeightOnly(4, model.group_size), Int8((1, -1), Activation(Element.INT8))):
        yield expert_workload(inputs, model, scheme, step.num_tokens)


def _route(inputs: Inputs, model: ModelShapes, step: Step) -> Workload:
    logits = inputs.randn(step.num_tokens, model.num_experts)

    def bind(candidate: Candidate) -> Call:
        return lambda: candidate.run(logits, model.top_k)

    return Workload(
        op="moe_route",
        label=f"{step.num_tokens} tokens, {model.top_k} of {model.num_experts}",
        problem=MoeRouteProblem(num_experts=model.num_experts, top_k=model.top_k, dtype=inputs.dtype),
        bind=bind,
        num_bytes=logits.nbytes + 8 * step.num_tokens * model.top_k,
        operations=4 * logits.numel(),
    )


def expert_workload(inputs: Inputs, model: ModelShapes, scheme: LinearScheme, num_tokens: int) -> Workload:
    """The gate-up product of every token with its ``top_k`` experts, chosen at random."""
    shape = (2 * model.intermediate, model.hidden)
    weights = [random_weight(inputs, scheme, shape) for _ in range(model.num_experts)]
    x = inputs.randn(num_tokens, model.hidden)
    ids = inputs.uniform(num_tokens, model.num_experts).topk(model.top_k, dim=1).indices.to(torch.int32)
    num_rows = ids.numel()

    def bind(candidate: Candidate) -> Call:
        assert candidate.prepare is not None, f"expert kernel {candidate.name} has no prepare"
        prepared = candidate.prepare(weights, inputs.dtype)
        return lambda: candidate.run(x, prepared, ids)

    used, counts = ids.unique(return_counts=True)
    results = num_rows * shape[0] * inputs.dtype.itemsize
    num_bytes = len(used) * weights[0].nbytes + x.nbytes + results + ids.nbytes
    return Workload(
        op="expert_linear",
        label=f"{scheme}, {num_tokens}x{shape[1]} -> {shape[0]}, {model.top_k} of {model.num_experts}",
        problem=ExpertLinearProblem(
            scheme=scheme,
            num_experts=model.num_experts,
            top_k=model.top_k,
            in_features=shape[1],
            out_features=shape[0],
            dtype=inputs.dtype,
        ),
        bind=bind,
        num_bytes=num_bytes,
        operations=2 * num_rows * shape[0] * shape[1],
        cached=CACHED,
        allowance=_allowance(counts, weights[0].nbytes, num_bytes, 0 if activation_of(scheme) is None else x.numel()),
    )


def _allowance(rows: torch.Tensor, weight_bytes: int, num_bytes: int, quantized: int) -> float:
    """An expert's weight is read once per tile of 16 rows, the lowest tile there is; quantized inputs are written and
    read once more; the order of the choices, written and read, is 12 bytes each."""
    again = (int((-(-rows // 16)).sum()) - len(rows)) * weight_bytes
    return 1.05 + (again + 2 * quantized + 24 * int(rows.sum())) / num_bytes
