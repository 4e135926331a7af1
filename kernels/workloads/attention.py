"""Paged attention and the write into its cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from ..attention_batch import AttentionBatch
from ..kv_layout import KVCache, allocate_kv_cache
from ..problems import AttentionProblem, KVWriteProblem, dtype_name
from ..registry import Candidate
from .workload import Call, Inputs, ModelShapes, Step, Workload

BLOCK_SIZE = 16
TABLES = frozenset({"block_table_ptr", "query_start_loc_ptr", "seq_lens_ptr"})


def workloads(inputs: Inputs, model: ModelShapes, step: Step) -> Iterator[Workload]:
    """Attention over a cache of the activations' dtype, for float32 of bfloat16 too, and of each 8-bit type; writes."""
    narrower = torch.bfloat16 if inputs.dtype is torch.float32 else None
    for kv_dtype in (inputs.dtype, narrower, torch.int8, inputs.fp8):
        if kv_dtype is not None:
            cache, batch = random_cache(inputs, model, step, kv_dtype)
            yield attention_workload(inputs, model, step, cache, batch)
            yield _write(inputs, model, step, cache, batch)


def random_cache(
    inputs: Inputs, model: ModelShapes, step: Step, kv_dtype: torch.dtype | None = None
) -> tuple[KVCache, AttentionBatch]:
    """One layer's cache (of the activations' dtype), its blocks scattered among the requests, and the step over it."""
    pages = [-(-length // BLOCK_SIZE) for length in step.seq_lens]
    cache = allocate_kv_cache(
        sum(pages), BLOCK_SIZE, model.num_kv_heads, model.head_size, kv_dtype or inputs.dtype, inputs.device
    )
    _fill(inputs, cache)
    scattered = torch.randperm(sum(pages)).to(torch.int32)
    table = torch.zeros((len(pages), max(pages)), dtype=torch.int32)
    slots, first = [], 0
    for row, (count, new, length) in enumerate(zip(pages, step.query_lens, step.seq_lens, strict=True)):
        table[row, :count] = scattered[first : first + count]
        places = torch.arange(length - new, length)
        slots.append(table[row, places // BLOCK_SIZE].long() * BLOCK_SIZE + places % BLOCK_SIZE)
        first += count
    starts = torch.tensor((0, *step.query_lens)).cumsum(0).to(torch.int32)
    batch = AttentionBatch(
        query_start_loc=starts.to(inputs.device),
        seq_lens=torch.tensor(step.seq_lens, dtype=torch.int32).to(inputs.device),
        block_table=table.to(inputs.device),
        slot_mapping=torch.cat(slots).to(inputs.device),
        query_lens_host=step.query_lens,
        seq_lens_host=step.seq_lens,
    )
    return cache, batch


def _fill(inputs: Inputs, cache: KVCache) -> None:
    for part in (cache.key, cache.value):
        part.copy_(torch.randn(part.shape, device=inputs.device).mul_(16 if cache.is_scaled else 1))
    for scale in (cache.key_scale, cache.value_scale):
        if scale is not None:
            scale.uniform_(0.01, 0.02)


def attention_workload(
    inputs: Inputs, model: ModelShapes, step: Step, cache: KVCache, batch: AttentionBatch
) -> Workload:
    """Every cached token of a request read once for each step, by all the query heads that share it."""
    query = inputs.randn(step.num_tokens, model.num_heads, model.head_size)
    scale = model.head_size**-0.5

    def bind(candidate: Candidate) -> Call:
        return lambda: candidate.run(query, cache, batch, scale, None, 0.0)

    lengths = list(zip(step.query_lens, step.seq_lens, strict=True))
    pairs = sum(new * length - new * (new - 1) // 2 for new, length in lengths)
    per_token = sum(part[0, 0].numel() * part.element_size() for part in cache.tensors)
    return Workload(
        op="paged_attention",
        label=f"{_label(model, step)}, {dtype_name(cache.key.dtype)}",
        problem=AttentionProblem(
            num_heads=model.num_heads,
            num_kv_heads=model.num_kv_heads,
            head_size=model.head_size,
            block_size=BLOCK_SIZE,
            dtype=inputs.dtype,
            kv_dtype=cache.key.dtype,
        ),
        bind=bind,
        num_bytes=sum(step.seq_lens) * per_token + 2 * query.nbytes,
        operations=4 * pairs * model.num_heads * model.head_size,
        peer_name="SDPA",
        peer=_sdpa(inputs, model, step),
        cached=TABLES,
    )


def _label(model: ModelShapes, step: Step) -> str:
    heads = f"{model.num_heads}/{model.num_kv_heads} heads of {model.head_size}"
    return f"{len(step.seq_lens)} requests, {step.num_tokens} of {sum(step.seq_lens)} tokens, {heads}"


def _sdpa(inputs: Inputs, model: ModelShapes, step: Step) -> Callable[[], Call]:
    """torch's attention over keys and values that already lie side by side: one call per group of equal requests."""

    def peer() -> Call:
        groups: dict[tuple[int, int], int] = {}
        for lengths in zip(step.query_lens, step.seq_lens, strict=True):
            groups[lengths] = groups.get(lengths, 0) + 1
        arguments = [_dense_context(inputs, model, count, *lengths) for lengths, count in groups.items()]

        def run() -> list[Tensor]:
            return [
                F.scaled_dot_product_attention(*tensors, is_causal=causal, enable_gqa=True)
                for tensors, causal in arguments
            ]

        return run

    return peer


def _dense_context(
    inputs: Inputs, model: ModelShapes, count: int, new: int, length: int
) -> tuple[tuple[Tensor, Tensor, Tensor], bool]:
    """(query, key, value) [B,H,L,D]. A chunk at the end of a longer context goes unmasked: the flash kernel takes no
    such mask, and work for a little more than the causal part flatters nobody by much."""
    query = inputs.randn(count, model.num_heads, new, model.head_size)
    key, value = (inputs.randn(count, model.num_kv_heads, length, model.head_size) for _ in range(2))
    return (query, key, value), new == length > 1


def _write(inputs: Inputs, model: ModelShapes, step: Step, cache: KVCache, batch: AttentionBatch) -> Workload:
    key, value = (inputs.randn(step.num_tokens, model.num_kv_heads, model.head_size) for _ in range(2))

    def bind(candidate: Candidate) -> Call:
        return lambda: candidate.run(key, value, cache, batch.slot_mapping)

    stored = sum(part[0, 0].numel() * part.element_size() for part in cache.tensors)
    return Workload(
        op="write_kv",
        label=f"{step.num_tokens} tokens, {model.num_kv_heads}x{model.head_size}, {dtype_name(cache.key.dtype)}",
        problem=KVWriteProblem(dtype=inputs.dtype, kv_dtype=cache.key.dtype),
        bind=bind,
        num_bytes=key.nbytes + value.nbytes + step.num_tokens * stored + batch.slot_mapping.nbytes,
        operations=0,
        cached=frozenset({"slot_mapping_ptr"}),
    )
