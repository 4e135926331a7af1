"""Multi-head latent attention, absorbed: one KV head of 576 whose first 512 features are the values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from ..kv_layout import KVCache
from ..problems import AttentionProblem, dtype_name
from ..registry import Candidate
from .attention import BLOCK_SIZE, TABLES, random_cache
from .workload import Call, Inputs, ModelShapes, Step, Workload

KEY_SIZE, VALUE_SIZE = 576, 512
NUM_HEADS = {"tiny": 16}  # others: DeepSeek's 128


def workloads(inputs: Inputs, model: ModelShapes, step: Step) -> Iterator[Workload]:
    """Attention over a cache of the activations' dtype."""
    yield latent_workload(inputs, model, step)


def latent_workload(inputs: Inputs, model: ModelShapes, step: Step, kv_dtype: torch.dtype | None = None) -> Workload:
    """Every cached token read once for each step, by all the query heads; ``kv_dtype`` None: as the activations."""
    shapes = replace(model, num_heads=NUM_HEADS.get(model.name, 128), num_kv_heads=1, head_size=KEY_SIZE)
    full, batch = random_cache(inputs, shapes, step, kv_dtype)
    cache = KVCache(full.key, full.key[..., :VALUE_SIZE], full.key_scale, full.key_scale)
    query = inputs.randn(step.num_tokens, shapes.num_heads, KEY_SIZE)
    lengths = list(zip(step.query_lens, step.seq_lens, strict=True))
    pairs = sum(new * length - new * (new - 1) // 2 for new, length in lengths)
    results = query.nbytes * VALUE_SIZE // KEY_SIZE
    per_token = sum(part[0, 0].nbytes for part in cache.tensors)
    num_bytes = sum(step.seq_lens) * per_token + query.nbytes + results
    again = _reads_again(step, shapes.num_heads) * per_token + _parts(step, shapes.num_heads)

    def bind(candidate: Candidate) -> Call:
        return lambda: candidate.run(query, cache, batch, KEY_SIZE**-0.5, None, 0.0)

    label = f"{len(step.seq_lens)} requests, {step.num_tokens} of {sum(step.seq_lens)} tokens"
    return Workload(
        op="paged_attention",
        label=f"{label}, {shapes.num_heads}/1 heads of {KEY_SIZE} and {VALUE_SIZE}, {dtype_name(cache.key.dtype)}",
        problem=AttentionProblem(
            num_heads=shapes.num_heads,
            num_kv_heads=1,
            head_size=KEY_SIZE,
            value_head_size=VALUE_SIZE,
            block_size=BLOCK_SIZE,
            dtype=inputs.dtype,
            kv_dtype=cache.key.dtype,
        ),
        bind=bind,
        num_bytes=num_bytes,
        operations=2 * pairs * shapes.num_heads * (KEY_SIZE + VALUE_SIZE),
        cached=TABLES,
        allowance=1.05 + again / num_bytes,
    )


def _reads_again(step: Step, num_heads: int) -> int:
    """Tokens that programs of 32 query rows, the lowest there are, read beyond one reading of each context."""
    per_program, programs_per_token = max(1, 32 // num_heads), max(1, num_heads // 32)
    read = 0
    for new, length in zip(step.query_lens, step.seq_lens, strict=True):
        ends = range(length - new + per_program, length + per_program, per_program)
        read += programs_per_token * sum(min(end, length) for end in ends)
    return read - sum(step.seq_lens)


def _parts(step: Step, num_heads: int) -> int:
    """Bytes of the float32 sums of split contexts, written and read: a part has at least 256 tokens."""
    parts = max(step.seq_lens) // 256
    return 8 * step.num_tokens * num_heads * parts * (VALUE_SIZE + 2) if parts > 1 else 0
