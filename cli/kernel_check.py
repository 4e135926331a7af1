"""Every kernel candidate: asked whether it can run typical problems, and checked against its definition."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..engine.kv_cache_type import kv_cache_type
from ..kernels import reference
from ..kernels.attention_batch import AttentionBatch
from ..kernels.kernel_set import default_registry
from ..kernels.kv_layout import KVCache, allocate_kv_cache
from ..kernels.problems import (
    AttentionProblem,
    ExpertLinearProblem,
    KVWriteProblem,
    LinearProblem,
    LoraProblem,
    MoeRouteProblem,
    PlainProblem,
    SamplingProblem,
)
from ..kernels.registry import Candidate
from ..kernels.sampling_options import DrawOptions, LogitEdits
from ..platforms.interface import Platform
from ..quant.canonical import CanonicalWeight, DenseWeight, PackedWeight, dequantize, pack
from ..quant.scheme import Dense, WeightOnly

NUM_FEATURES = 128
NUM_TOKENS = 3000
NUM_EXPERTS, TOP_K = 6, 2
HEADS, KV_HEADS, HEAD_SIZE, BLOCK_SIZE = 4, 2, 64, 16
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}
SCHEMES = (Dense(), WeightOnly(4, 32), WeightOnly(4, 32, symmetric=False), WeightOnly(8, 32))
Answer = Tensor | tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Case:
    """One operation on one typical problem; ``run`` calls a candidate, ``expected`` is the definition's answer."""

    op: str
    problem: Any
    run: Callable[[Candidate], Answer]
    expected: Answer


def check_kernels(platform: Platform) -> list[dict[str, str]]:
    """One row per case and candidate: ``op problem kernel quality status detail``.

    ``status`` is ``selected`` or ``ready`` (it ran and agrees; ``detail`` has the largest error relative to the largest
    value), ``refused`` (``detail`` has the reason) or ``wrong``.
    """
    dtype = platform.preferred_dtype(torch.bfloat16)
    registry = default_registry(platform.spec)
    rows = []
    for case in make_cases(dtype, platform.device, kv_cache_type("fp8", dtype, platform.spec, None).dtype):
        selected = False
        for candidate in registry.candidates(case.op):
            reason = candidate.can_run(platform.spec, case.problem)
            status, detail = ("refused", reason) if reason else check(case, candidate, TOLERANCE[dtype])
            if status == "ready" and not selected:
                status, selected = "selected", True
            rows.append(
                {
                    "op": case.op,
                    "problem": str(case.problem),
                    "kernel": candidate.name,
                    "quality": candidate.quality.value,
                    "status": status,
                    "detail": detail,
                }
            )
    return rows


def check(case: Case, candidate: Candidate, tolerance: float) -> tuple[str, str]:
    """Run one candidate and compare it with the definition."""
    try:
        error = relative_error(case.run(candidate), case.expected)
    except Exception as failure:  # whatever a kernel dies of is what the user needs to read
        return "wrong", f"{type(failure).__name__}: {failure}"
    return ("ready" if error <= tolerance else "wrong"), f"error {error:.1e}"


def relative_error(actual: Answer, expected: Answer) -> float:
    """Largest difference over the largest expected value; infinite where something is not finite."""
    pairs = zip(_as_tuple(actual), _as_tuple(expected), strict=True)
    worst = 0.0
    for got, want in pairs:
        difference = (got.float() - want.float()).abs().max() / want.float().abs().max().clamp(min=1e-6)
        worst = max(worst, float(difference.nan_to_num(nan=float("inf"))))
    return worst


def make_cases(dtype: torch.dtype, device: torch.device, fp8_dtype: torch.dtype = torch.float8_e4m3fn) -> list[Case]:
    """Seeded small problems that cover every operation, and attention over each type of KV cache."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device=device, dtype=dtype)

    plain = PlainProblem(dtype)
    x, residual, weight = randn(5, NUM_FEATURES), randn(5, NUM_FEATURES), randn(NUM_FEATURES)
    gate_up = randn(5, 2 * NUM_FEATURES)
    q, k = randn(5, HEADS, HEAD_SIZE), randn(5, KV_HEADS, HEAD_SIZE)
    angles = torch.rand(64, HEAD_SIZE // 2, generator=generator)
    rotation = torch.cat((angles.cos(), angles.sin()), -1).to(device)
    positions = torch.arange(7, 12, device=device)
    calls: list[tuple[str, tuple[Any, ...]]] = [
        ("rms_norm", (x, weight, 1e-5)),
        ("add_rms_norm", (x, residual, weight, 1e-5)),
        ("rope", (q, k, rotation, positions, False)),
        ("silu_and_mul", (gate_up,)),
        ("gelu_and_mul", (gate_up, "tanh")),
    ]
    cases = [_plain_case(op, plain, arguments) for op, arguments in calls]
    cases += [_linear_case(scheme, x, generator) for scheme in SCHEMES]
    cases += _expert_cases(x, generator)
    cases += _cache_cases(plain, k, randn)
    cases += [*_sampling_cases(device, generator), *_lora_cases(randn, x)]
    return cases + [_attention_case(dtype, kind, device, generator) for kind in (dtype, torch.int8, fp8_dtype)]


def _plain_case(op: str, problem: PlainProblem, arguments: tuple[Any, ...]) -> Case:
    definition: Callable[..., Answer] = getattr(reference, op)

    def run(candidate: Candidate) -> Answer:
        # A kernel may work in place; each gets arguments of its own.
        return candidate.run(*(value.clone() if isinstance(value, Tensor) else value for value in arguments))

    return Case(op, problem, run, definition(*arguments))


def _cache_cases(problem: PlainProblem, key: Tensor, randn: Callable[..., Tensor]) -> list[Case]:
    """The operations that change the caches; their answer is what the caches hold afterwards."""
    caches = [randn(6, BLOCK_SIZE, KV_HEADS, HEAD_SIZE) for _ in range(2)]
    slots = torch.tensor([3, 80, 17, 18, 95], device=key.device)

    def write_kv(run: Callable[..., None]) -> Answer:
        copy = KVCache(caches[0].clone(), caches[1].clone())
        run(key, key + 1, copy, slots)
        return copy.key, copy.value

    def copy_blocks(run: Callable[..., None]) -> Answer:
        copies = [cache.clone() for cache in caches]
        run(copies, [(0, 5), (2, 3)])
        return tuple(copies)

    writes = KVWriteProblem(dtype=problem.dtype, kv_dtype=problem.dtype)
    return [
        Case("write_kv", writes, lambda candidate: write_kv(candidate.run), write_kv(reference.write_kv)),
        Case("copy_blocks", problem, lambda candidate: copy_blocks(candidate.run), copy_blocks(reference.copy_blocks)),
    ]


def _sampling_cases(device: torch.device, generator: torch.Generator) -> list[Case]:
    """One row for each way to draw, and edits of a few logits."""
    logits = 3 * torch.randn(5, NUM_TOKENS, generator=generator).to(device)
    options = DrawOptions(
        temperature=np.array([0.0, 0.8, 1.0, 1.0, 1.3], dtype=np.float32),
        top_k=np.array([0, 0, 40, 0, 20], dtype=np.int64),
        top_p=np.array([1.0, 1.0, 1.0, 0.9, 0.7], dtype=np.float32),
        min_p=np.array([0.0, 0.0, 0.0, 0.05, 0.0], dtype=np.float32),
        uniform=np.array([0.0, 0.3, 0.6, 0.9, 0.1]),
    )
    edits = LogitEdits(
        rows=np.arange(5),
        tokens=np.arange(5) * 7,
        counts=np.array([-1, 0, 1, 2, 3], dtype=np.int32),
        bias=np.full(5, 0.5, dtype=np.float32),
        repetition_penalty=np.full(5, 1.5, dtype=np.float32),
        presence_penalty=np.full(5, 0.25, dtype=np.float32),
        frequency_penalty=np.full(5, 0.75, dtype=np.float32),
    )

    def edit(run: Callable[..., None]) -> Answer:
        copy = logits.clone()
        run(copy, edits)
        return copy

    problem = SamplingProblem(vocab_size=NUM_TOKENS)
    drawn, best = reference.draw_tokens(logits, options), reference.argmax(logits)
    return [
        Case("argmax", problem, lambda candidate: candidate.run(logits), best),
        Case("draw_tokens", problem, lambda candidate: candidate.run(logits, options), drawn),
        Case("edit_logits", problem, lambda candidate: edit(candidate.run), edit(reference.edit_logits)),
    ]


def _lora_cases(randn: Callable[..., Tensor], x: Tensor) -> list[Case]:
    """Three adapters and a row without one."""
    problem = LoraProblem(rank=8, in_features=NUM_FEATURES, out_features=64, dtype=x.dtype)
    a, b, out = randn(3, 8, NUM_FEATURES), randn(3, 64, 8), randn(5, 64)
    ids = torch.tensor([2, 0, -1, 1, 2], dtype=torch.int32, device=x.device)
    scales = torch.tensor([0.5, 1.0, 2.0], device=x.device)
    shrunk = reference.lora_shrink(x, a, ids)

    def expand(run: Callable[..., None]) -> Answer:
        copy = out.clone()
        run(shrunk, b, ids, copy, scales)
        return copy

    return [
        Case("lora_shrink", problem, lambda candidate: candidate.run(x, a, ids), shrunk),
        Case("lora_expand", problem, lambda candidate: expand(candidate.run), expand(reference.lora_expand)),
    ]


def _linear_case(scheme: Dense | WeightOnly, x: Tensor, generator: torch.Generator) -> Case:
    weight = _random_weight(scheme, generator, x)

    def run(candidate: Candidate) -> Answer:
        assert candidate.prepare is not None, f"linear kernel {candidate.name} has no prepare"
        return candidate.run(x, candidate.prepare(weight, x.dtype), None)

    problem = LinearProblem(scheme=scheme, in_features=NUM_FEATURES, out_features=64, dtype=x.dtype)
    return Case("linear", problem, run, reference.linear(x.float(), dequantize(weight, torch.float32)))


def _expert_cases(x: Tensor, generator: torch.Generator) -> list[Case]:
    """Routing, and for each scheme the sum over a token's experts."""
    logits = torch.randn(x.shape[0], NUM_EXPERTS, generator=generator).to(x.device)
    routing = MoeRouteProblem(num_experts=NUM_EXPERTS, top_k=TOP_K, dtype=logits.dtype)
    chosen = reference.route(logits, TOP_K)
    cases = [Case("moe_route", routing, lambda candidate: candidate.run(logits, TOP_K), chosen)]
    return cases + [_expert_case(scheme, x, *chosen, generator) for scheme in SCHEMES]


def _expert_case(
    scheme: Dense | WeightOnly, x: Tensor, shares: Tensor, ids: Tensor, generator: torch.Generator
) -> Case:
    weights = [_random_weight(scheme, generator, x) for _ in range(NUM_EXPERTS)]

    def run(candidate: Candidate) -> Answer:
        assert candidate.prepare is not None, f"expert kernel {candidate.name} has no prepare"
        return candidate.run(x, candidate.prepare(weights, x.dtype), ids, shares)

    problem = ExpertLinearProblem(
        scheme=scheme,
        num_experts=NUM_EXPERTS,
        top_k=TOP_K,
        in_features=NUM_FEATURES,
        out_features=64,
        dtype=x.dtype,
    )
    dense = [dequantize(weight, torch.float32) for weight in weights]
    return Case("expert_linear", problem, run, reference.expert_linear(x.float(), dense, ids, shares))


def _random_weight(scheme: Dense | WeightOnly, generator: torch.Generator, like: Tensor) -> CanonicalWeight:
    shape = (64, NUM_FEATURES)
    if isinstance(scheme, Dense):
        return DenseWeight(torch.randn(shape, generator=generator).to(like))
    codes = torch.randint(0, 2**scheme.bits, shape, generator=generator, dtype=torch.int32)
    groups = (shape[0], scheme.num_groups(NUM_FEATURES))
    zeros = torch.randint(0, 2**scheme.bits, groups, generator=generator).to(torch.uint8)
    return PackedWeight(
        scheme=scheme,
        shape=shape,
        qweight=pack(codes, scheme.bits).to(like.device),
        scales=(torch.rand(groups, generator=generator) / 8 + 0.01).to(like.device),
        zeros=None if scheme.symmetric else zeros.to(like.device),
    )


def _attention_case(
    dtype: torch.dtype, kv_dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> Case:
    """A prefill of 20 tokens beside a decode step at length 33, in one batch."""
    query_lens, seq_lens = (20, 1), (20, 33)
    table = torch.tensor([[0, 1, 0], [4, 2, 3]], dtype=torch.int32, device=device)
    cache = allocate_kv_cache(5, BLOCK_SIZE, KV_HEADS, HEAD_SIZE, kv_dtype, device)
    keys, values = torch.randn(2, 5 * BLOCK_SIZE, KV_HEADS, HEAD_SIZE, generator=generator).to(device)
    reference.write_kv(keys, values, cache, torch.arange(5 * BLOCK_SIZE, device=device))
    query = torch.randn(sum(query_lens), HEADS, HEAD_SIZE, generator=generator).to(device=device, dtype=dtype)
    slots = torch.cat((torch.arange(20), torch.tensor([3 * BLOCK_SIZE]))).to(device)
    batch = AttentionBatch(
        query_start_loc=torch.tensor([0, 20, 21], dtype=torch.int32, device=device),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
        block_table=table,
        slot_mapping=slots,
        query_lens_host=query_lens,
        seq_lens_host=seq_lens,
    )
    problem = AttentionProblem(
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_size=HEAD_SIZE,
        block_size=BLOCK_SIZE,
        dtype=dtype,
        kv_dtype=kv_dtype,
    )
    arguments = (query, cache, batch, HEAD_SIZE**-0.5, None, 0.0)
    return Case(
        "paged_attention", problem, lambda candidate: candidate.run(*arguments), reference.paged_attention(*arguments)
    )


def _as_tuple(value: Answer) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)
