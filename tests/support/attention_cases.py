"""Seeded paged-attention problems with an independent answer computed per token in float64."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import torch
from torch import Tensor
from twofold.kernels.attention_batch import AttentionBatch
from twofold.kernels.kv_layout import allocate_kv_cache


@dataclass
class AttentionCase:
    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    batch: AttentionBatch
    keys: list[Tensor]
    values: list[Tensor]


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
    key_cache, value_cache = allocate_kv_cache(len(blocks) + 1, block_size, num_kv_heads, head_size, dtype, "cpu")
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
        for position in range(seq_len):
            key_cache[mine[position // block_size], position % block_size] = key[position]
            value_cache[mine[position // block_size], position % block_size] = value[position]
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


def expected_attention(case: AttentionCase, scale: float, window: int | None = None, soft_cap: float = 0.0) -> Tensor:
    """Row by row and head by head, in float64."""
    output = torch.zeros(case.query.shape, dtype=torch.float64)
    group = case.query.shape[1] // case.key_cache.shape[2]
    token = 0
    for row, (query_len, seq_len) in enumerate(zip(case.batch.query_lens_host, case.batch.seq_lens_host, strict=True)):
        for position in range(seq_len - query_len, seq_len):
            first = 0 if window is None else max(0, position - window + 1)
            for head in range(case.query.shape[1]):
                key = case.keys[row][first : position + 1, head // group].double()
                value = case.values[row][first : position + 1, head // group].double()
                score = key @ case.query[token, head].double() * scale
                if soft_cap:
                    score = soft_cap * torch.tanh(score / soft_cap)
                weight = torch.exp(score - score.max())
                output[token, head] = (weight / weight.sum()) @ value
            token += 1
    return output
