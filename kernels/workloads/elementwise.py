"""Norms, activations and the rotary embedding."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from ..problems import PlainProblem
from ..registry import Candidate
from .workload import Call, Inputs, ModelShapes, Step, Workload


def workloads(inputs: Inputs, model: ModelShapes, step: Step) -> Iterator[Workload]:
    """The row-wise operations of one layer."""
    yield _norm(inputs, model, step, add=False)
    yield _norm(inputs, model, step, add=True)
    yield _activation(inputs, model, step)
    yield _rope(inputs, model, step)


def _norm(inputs: Inputs, model: ModelShapes, step: Step, *, add: bool) -> Workload:
    x, residual = (inputs.randn(step.num_tokens, model.hidden) for _ in range(2))
    weight = inputs.randn(model.hidden)
    arguments = (x, residual) if add else (x,)

    def bind(candidate: Candidate) -> Call:
        return lambda: candidate.run(*arguments, weight, 1e-5)

    def norm() -> Call:
        return lambda: F.rms_norm(x, (model.hidden,), weight, 1e-5)

    return Workload(
        op="add_rms_norm" if add else "rms_norm",
        label=f"{step.num_tokens}x{model.hidden}",
        problem=PlainProblem(inputs.dtype),
        bind=bind,
        num_bytes=(4 if add else 2) * x.nbytes + weight.nbytes,
        operations=(5 if add else 4) * x.numel(),
        peer_name="" if add else "rms_norm",
        peer=None if add else norm,
        cached=frozenset({"weight_ptr"}),
    )


def _activation(inputs: Inputs, model: ModelShapes, step: Step) -> Workload:
    x = inputs.randn(step.num_tokens, 2 * model.intermediate)

    def bind(candidate: Candidate) -> Call:
        return lambda: candidate.run(x)

    def peer() -> Call:
        gate, up = x.chunk(2, dim=-1)
        return lambda: F.silu(gate) * up

    return Workload(
        op="silu_and_mul",
        label=f"{step.num_tokens}x{model.intermediate}",
        problem=PlainProblem(inputs.dtype),
        bind=bind,
        num_bytes=x.nbytes * 3 // 2,
        operations=3 * x.numel(),
        peer_name="silu, mul",
        peer=peer,
    )


def _rope(inputs: Inputs, model: ModelShapes, step: Step) -> Workload:
    query = inputs.randn(step.num_tokens, model.num_heads, model.head_size)
    key = inputs.randn(step.num_tokens, model.num_kv_heads, model.head_size)
    angles = inputs.uniform(max(step.seq_lens), model.head_size // 2)
    table = torch.cat((angles.cos(), angles.sin()), -1)
    places = [torch.arange(length - new, length) for new, length in zip(step.query_lens, step.seq_lens, strict=True)]
    positions = torch.cat(places).to(inputs.device)

    def bind(candidate: Candidate) -> Call:
        return lambda: candidate.run(query, key, table, positions, False)

    elements = query.numel() + key.numel()
    return Workload(
        op="rope",
        label=f"{step.num_tokens} tokens, {model.num_heads}+{model.num_kv_heads} heads of {model.head_size}",
        problem=PlainProblem(inputs.dtype),
        bind=bind,
        num_bytes=2 * elements * query.element_size() + step.num_tokens * (table[0].nbytes + 8),
        operations=3 * elements,
        cached=frozenset({"cos_sin_ptr", "positions_ptr"}),
    )
