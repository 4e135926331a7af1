"""Norms, activations, the rotary embedding, and what a CPU computes besides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...quant.canonical import dequantize
from ...quant.scheme import Offset, WeightOnly
from .. import reference
from ..problems import PlainProblem
from ..registry import Candidate
from .case import Answer, Case, Source
from .products import random_weight

LIMIT = 5.0


def cases(source: Source) -> list[Case]:
    """On a CPU also the soft cap, the gate of a shared expert and rows of a packed embedding."""
    sizes = source.sizes
    tokens, features = sizes.num_tokens, sizes.in_features
    x, residual, weight = source.randn(tokens, features), source.randn(tokens, features), source.randn(features)
    gate_up = source.randn(tokens, 2 * features)
    q, k = (source.randn(tokens, heads, sizes.head_size) for heads in (sizes.num_heads, sizes.num_kv_heads))
    calls: list[tuple[str, tuple[Any, ...]]] = [
        ("rms_norm", (x, weight, 1e-5)),
        ("add_rms_norm", (x, residual, weight, 1e-5)),
        ("rope", (q, k, rotation(source, tokens + 7), torch.arange(7, 7 + tokens, device=source.device), False)),
        ("silu_and_mul", (gate_up,)),
        ("gelu_and_mul", (gate_up, "tanh")),
    ]
    plain = [_case(source, op, getattr(reference, op), arguments) for op, arguments in calls]
    return plain + (_cpu_cases(source, x) if source.on_cpu else [])


def rotation(source: Source, positions: int) -> Tensor:
    """float32 [P,R]: cosines and sines of random angles, R the largest even size that a head has room for."""
    angles = source.uniform(positions, source.sizes.head_size // 2)
    return torch.cat((angles.cos(), angles.sin()), -1)


def _case(source: Source, op: str, definition: Callable[..., Answer], arguments: tuple[Any, ...]) -> Case:
    def run(candidate: Candidate) -> Answer:
        # A kernel may work in place; each gets arguments of its own.
        answer: Answer = candidate.run(*(each.clone() if isinstance(each, Tensor) else each for each in arguments))
        return answer

    return Case(op, PlainProblem(source.dtype), run, definition(*arguments))


def _cpu_cases(source: Source, x: Tensor) -> list[Case]:
    gates = source.randn(x.shape[0], 1)
    capped = _case(source, "soft_cap", lambda x, limit: limit * torch.tanh(x / limit), (3 * x, LIMIT))
    gated = _case(source, "sigmoid_gate", lambda x, gates: x * torch.sigmoid(gates), (x, gates))
    return [capped, gated, _embedding_case(source)]


def _embedding_case(source: Source) -> Case:
    """Rows of weights with codes around their middle, with zeros and with offsets."""
    weights = [random_weight(source, scheme) for scheme in (WeightOnly(4, 32), WeightOnly(8, 32, False), Offset(4, 32))]
    ids = source.integers(source.sizes.out_features, (source.sizes.num_tokens,), torch.int64)

    def run(candidate: Candidate) -> Answer:
        return tuple(candidate.run(ids, weight) for weight in weights)

    expected = tuple(dequantize(weight, torch.float32)[ids] for weight in weights)
    return Case("embed_packed", PlainProblem(source.dtype), run, expected)
