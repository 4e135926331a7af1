"""Norms, activations, the rotary embedding, and what a CPU computes besides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...quant.canonical import dequantize
from ...quant.scheme import Offset, WeightOnly
from .. import reference
from ..problems import PlainProblem, QuantizeProblem
from ..registry import Candidate
from .case import Answer, Case, Source
from .products import random_weight

LIMIT = 5.0
# Half a unit in the last place of the largest values.
BFLOAT16_STEP = 2.0**-8


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
    if not source.on_cpu:
        return plain
    return [*plain, *_cpu_cases(source, x), *_rounding_cases(source, x, residual, weight)]


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


def _rounding_cases(source: Source, x: Tensor, residual: Tensor, weight: Tensor) -> list[Case]:
    """Norms for products in bfloat16: few rows as they are, many rounded."""
    problem = QuantizeProblem(activation=None, codes_dtype=torch.bfloat16, dtype=source.dtype)

    def norm(candidate: Candidate) -> Answer:
        result: Tensor = candidate.run(x, weight, 1e-5, torch.bfloat16)
        return result.to(source.dtype)

    def add_norm(candidate: Candidate) -> Answer:
        result, total = candidate.run(x, residual.clone(), weight, 1e-5, torch.bfloat16)
        return result.to(source.dtype), total

    expected, added = reference.rms_norm(x, weight, 1e-5), reference.add_rms_norm(x, residual, weight, 1e-5)
    return [
        Case("rms_norm_quantized", problem, norm, expected, "bf16", BFLOAT16_STEP),
        Case("add_rms_norm_quantized", problem, add_norm, added, "bf16", BFLOAT16_STEP),
    ]


def _embedding_case(source: Source) -> Case:
    """Rows of weights with codes around their middle, with zeros and with offsets."""
    weights = [random_weight(source, scheme) for scheme in (WeightOnly(4, 32), WeightOnly(8, 32, False), Offset(4, 32))]
    ids = source.integers(source.sizes.out_features, (source.sizes.num_tokens,), torch.int64)

    def run(candidate: Candidate) -> Answer:
        return tuple(candidate.run(ids, weight) for weight in weights)

    expected = tuple(dequantize(weight, torch.float32)[ids] for weight in weights)
    return Case("embed_packed", PlainProblem(source.dtype), run, expected)
