"""Seeded paged-attention problems with an independent answer computed per token in float64."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import torch
from torch import Tensor
from twofold.kernels.attention_batch import AttentionBatch
from twofold.kernels.cpu import attention, elementwise, fused
from twofold.kernels.kv_layout import KVCache, allocate_kv_cache


@dataclass
class AttentionCase:
    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    batch: AttentionBatch
    keys: list[Tensor]
    values: list[Tensor]

    @property
    def cache(self) -> KVCache:
        return KVCache(self.key_cache, self.value_cache)


def make_case(
    lengths: list[tuple[int, int]],
    *,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    block_size: int,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    spread: float = 1.0,
) -> AttentionCase:
    """``lengths`` lists (query_len, seq_len) per request; cache blocks are scattered and unused slots hold NaN."""
    generator = torch.Generator().manual_seed(seed)
    needed = [-(-seq_len // block_size) for _, seq_len in lengths]
    blocks = list(range(1, sum(needed) + 3))
    random.Random(seed).shuffle(blocks)
    cache = allocate_kv_cache(len(blocks) + 1, block_size, num_kv_heads, head_size, dtype, "cpu")
    key_cache, value_cache = cache.key, cache.value
    key_cache.fill_(math.nan)
    value_cache.fill_(math.nan)
    table = torch.zeros(len(lengths), max(needed, default=0) + 2, dtype=torch.int32)
    keys, values, slots = [], [], []
    for row, (query_len, seq_len) in enumerate(lengths):
        mine = [blocks.pop() for _ in range(needed[row])]
        table[row, : len(mine)] = torch.tensor(mine, dtype=torch.int32)
        key, value = (
            (torch.randn(seq_len, num_kv_heads, head_size, generator=generator) * spread).to(dtype) for _ in range(2)
        )
        owner = torch.tensor(mine).repeat_interleave(block_size)[:seq_len]
        offset = torch.arange(seq_len) % block_size
        key_cache[owner, offset], value_cache[owner, offset] = key, value
        slots += [mine[p // block_size] * block_size + p % block_size for p in range(seq_len - query_len, seq_len)]
        keys.append(key)
        values.append(value)
    query_lens = [query_len for query_len, _ in lengths]
    batch = AttentionBatch(
        query_start_loc=torch.tensor([0, *torch.tensor(query_lens).cumsum(0).tolist()], dtype=torch.int32),
        seq_lens=torch.tensor([seq_len for _, seq_len in lengths], dtype=torch.int32),
        block_table=table,
        slot_mapping=torch.tensor(slots, dtype=torch.int64),
        query_lens_host=tuple(query_lens),
        seq_lens_host=tuple(seq_len for _, seq_len in lengths),
    )
    query = (torch.randn(sum(query_lens), num_heads, head_size, generator=generator) * spread).to(dtype)
    return AttentionCase(query, key_cache, value_cache, batch, keys, values)


def queries_for(query: Tensor, scale: float, soft_cap: float = 0.0) -> Tensor:
    """float32 queries that are the given bfloat16 numbers once a kernel has multiplied them by what it rounds after.

    That is the scale, in powers of two where no soft cap comes between.
    """
    factor = torch.tensor(scale) * (1.0 if soft_cap else math.log2(math.e))
    return query.float() / factor


def expected_attention(case: AttentionCase, scale: float, window: int | None = None, soft_cap: float = 0.0) -> Tensor:
    """Request by request and head by head from the tokens themselves, in float64."""
    output = torch.zeros(case.query.shape, dtype=torch.float64)
    group = case.query.shape[1] // case.key_cache.shape[2]
    start = 0
    for row, (query_len, seq_len) in enumerate(zip(case.batch.query_lens_host, case.batch.seq_lens_host, strict=True)):
        position = torch.arange(seq_len - query_len, seq_len)[:, None]
        column = torch.arange(seq_len)[None]
        seen = (column <= position) & (column > position - (window or seq_len + 1))
        for head in range(case.query.shape[1]):
            score = case.query[start : start + query_len, head].double() @ case.keys[row][:, head // group].double().T
            score *= scale
            if soft_cap:
                score = soft_cap * torch.tanh(score / soft_cap)
            weight = torch.where(seen, torch.exp(score - score.amax(1, keepdim=True)), 0.0)
            mixed = weight @ case.values[row][:, head // group].double()
            output[start : start + query_len, head] = mixed / weight.sum(1, keepdim=True)
        start += query_len
    return output


def check_fused(batch: AttentionBatch, first: KVCache, second: KVCache) -> None:
    """rope_write_attend into ``first`` gives bit for bit what rope, write_kv and paged_attention give with ``second``.

    6 query heads and 2 KV heads of 64.
    """
    tokens = int(batch.query_start_loc[-1])
    qkv, table, positions = torch.randn(tokens, 640), torch.randn(400, 64), torch.randint(0, 400, (tokens,))
    result = fused.rope_write_attend(qkv.clone(), table, positions, first, batch, 0.3)
    q, k, v = qkv.view(tokens, 10, 64).split((6, 2, 2), dim=1)
    q, k = elementwise.rope(q, k, table, positions, False)
    attention.write_kv(k, v, second, batch.slot_mapping)
    assert torch.equal(result, attention.paged_attention(q, second, batch, 0.3).flatten(1))
