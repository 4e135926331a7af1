"""Attention over each type of cache, and what changes the caches."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .. import reference
from ..attention_batch import AttentionBatch
from ..kv_layout import KVCache, allocate_kv_cache
from ..problems import AttentionProblem, KVWriteProblem, PlainProblem
from ..registry import Candidate
from .case import Answer, Case, Source
from .elementwise import rotation

NUM_BLOCKS = 6
# Of the largest value: where a bfloat16 cache is multiplied in bfloat16, queries and weights are rounded as well.
BFLOAT_WEIGHTS = 2.0**-6


def cases(source: Source) -> list[Case]:
    """A prompt beside a decode step, in one batch; on a CPU a bfloat16 cache, too, and the fused step of a layer."""
    on_cpu = [torch.bfloat16] if source.on_cpu else []
    found = _cache_cases(source)
    for kv_dtype in dict.fromkeys((source.dtype, *on_cpu, torch.int8, source.fp8)):
        cache, batch = _random_cache(source, kv_dtype), _batch(source)
        found += [_write_case(source, cache, batch), _attention_case(source, cache, batch)]
        found += [_fused_case(source, cache, batch)] if source.on_cpu else []
    return found


def _cache_cases(source: Source) -> list[Case]:
    sizes = source.sizes
    caches = [source.randn(NUM_BLOCKS, sizes.block_size, sizes.num_kv_heads, sizes.head_size) for _ in range(2)]

    def copy_blocks(run: Callable[..., None]) -> Answer:
        copies = [cache.clone() for cache in caches]
        run(copies, [(0, 5), (2, 3)])
        return tuple(copies)

    return [
        Case(
            "copy_blocks",
            PlainProblem(source.dtype),
            lambda candidate: copy_blocks(candidate.run),
            copy_blocks(reference.copy_blocks),
        )
    ]


def _random_cache(source: Source, kv_dtype: torch.dtype) -> KVCache:
    """Full of what was written from normal values."""
    sizes = source.sizes
    num_slots = NUM_BLOCKS * sizes.block_size
    cache = allocate_kv_cache(
        NUM_BLOCKS, sizes.block_size, sizes.num_kv_heads, sizes.head_size, kv_dtype, source.device
    )
    keys, values = (source.normal(num_slots, sizes.num_kv_heads, sizes.head_size) for _ in range(2))
    reference.write_kv(keys, values, cache, torch.arange(num_slots, device=source.device))
    return cache


def _batch(source: Source) -> AttentionBatch:
    """A prompt that fills a block and a quarter, and one token at the end of two blocks and one more slot."""
    size, device = source.sizes.block_size, source.device
    prompt, context = size + size // 4, 2 * size + 1
    blocks = ((0, 1, 0), (4, 2, 3))
    places = [blocks[0][place // size] * size + place % size for place in range(prompt)]
    return AttentionBatch(
        query_start_loc=torch.tensor([0, prompt, prompt + 1], dtype=torch.int32, device=device),
        seq_lens=torch.tensor((prompt, context), dtype=torch.int32, device=device),
        block_table=torch.tensor(blocks, dtype=torch.int32, device=device),
        slot_mapping=torch.tensor([*places, blocks[1][2] * size], device=device),
        query_lens_host=(prompt, 1),
        seq_lens_host=(prompt, context),
    )


def _copy(cache: KVCache) -> KVCache:
    return KVCache(*(None if part is None else part.clone() for part in _parts(cache)))  # type: ignore[arg-type]


def _parts(cache: KVCache) -> tuple[Tensor | None, ...]:
    return cache.key, cache.value, cache.key_scale, cache.value_scale


def _write_case(source: Source, cache: KVCache, batch: AttentionBatch) -> Case:
    """Its answer is what the cache holds afterwards."""
    shape = (batch.slot_mapping.numel(), source.sizes.num_kv_heads, source.sizes.head_size)
    key, value = source.randn(*shape), source.randn(*shape)

    def write(run: Callable[..., None]) -> Answer:
        copy = _copy(cache)
        run(key, value, copy, batch.slot_mapping)
        return tuple(part for part in _parts(copy) if part is not None)

    problem = KVWriteProblem(dtype=source.dtype, kv_dtype=cache.key.dtype)
    return Case("write_kv", problem, lambda candidate: write(candidate.run), write(reference.write_kv))


def _problem(source: Source, cache: KVCache) -> AttentionProblem:
    sizes = source.sizes
    return AttentionProblem(
        num_heads=sizes.num_heads,
        num_kv_heads=sizes.num_kv_heads,
        head_size=sizes.head_size,
        block_size=sizes.block_size,
        dtype=source.dtype,
        kv_dtype=cache.key.dtype,
    )


def _tolerance(source: Source, cache: KVCache) -> float | None:
    return BFLOAT_WEIGHTS if (source.dtype, cache.key.dtype) == (torch.float32, torch.bfloat16) else None


def _attention_case(source: Source, cache: KVCache, batch: AttentionBatch) -> Case:
    query = source.randn(batch.slot_mapping.numel(), source.sizes.num_heads, source.sizes.head_size)
    arguments = (query, cache, batch, source.sizes.head_size**-0.5, None, 0.0)

    def run(candidate: Candidate) -> Answer:
        result: Tensor = candidate.run(*arguments)
        return result

    expected = reference.paged_attention(*arguments)
    return Case("paged_attention", _problem(source, cache), run, expected, tolerance=_tolerance(source, cache))


def _fused_case(source: Source, cache: KVCache, batch: AttentionBatch) -> Case:
    """The rotary embedding, the write and attention in one call."""
    sizes, tokens = source.sizes, batch.slot_mapping.numel()
    heads = (sizes.num_heads, sizes.num_kv_heads, sizes.num_kv_heads)
    qkv = source.randn(tokens, sum(heads) * sizes.head_size)
    table, positions = rotation(source, tokens), torch.arange(tokens, device=source.device)
    scale = sizes.head_size**-0.5

    def run(candidate: Candidate) -> Answer:
        result: Tensor = candidate.run(qkv.clone(), table, positions, _copy(cache), batch, scale)
        return result

    q, k, v = qkv.view(tokens, sum(heads), sizes.head_size).split(heads, dim=1)
    q, k = reference.rope(q, k, table, positions, False)
    written = _copy(cache)
    reference.write_kv(k, v, written, batch.slot_mapping)
    expected = reference.paged_attention(q, written, batch, scale, None, 0.0).flatten(1)
    return Case("rope_write_attend", _problem(source, cache), run, expected, tolerance=_tolerance(source, cache))
