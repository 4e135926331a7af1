"""Attention over the paged KV cache."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..attention_batch import AttentionBatch
from ..kv_layout import KVCache
from .precision import wide


def paged_attention(
    query: Tensor,
    cache: KVCache,
    batch: AttentionBatch,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float = 0.0,
) -> Tensor:
    """Causal attention of query [T,H,D] over the cached context of its request -> [T,H,D].

    The last query row of a request stands at position seq_len - 1. Scores are ``scale * q.k``, capped to
    ``soft_cap * tanh(score / soft_cap)`` when soft_cap is not 0; a token sees itself and ``sliding_window - 1`` before
    it.
    """
    output = torch.empty_like(query)
    block_size = cache.block_size
    start = 0
    for row, (query_len, seq_len) in enumerate(zip(batch.query_lens_host, batch.seq_lens_host, strict=True)):
        blocks = batch.block_table[row, : -(-seq_len // block_size)].long()
        key = wide(cache.key[blocks].flatten(0, 1)[:seq_len])
        value = wide(cache.value[blocks].flatten(0, 1)[:seq_len])
        rows = slice(start, start + query_len)
        output[rows] = _attend(wide(query[rows]), key, value, scale, sliding_window, soft_cap).to(query.dtype)
        start += query_len
    return output


def _attend(
    query: Tensor, key: Tensor, value: Tensor, scale: float, sliding_window: int | None, soft_cap: float
) -> Tensor:
    """query [Q,H,D] over key and value [L,G,D]; head h reads KV head h // (H/G)."""
    query_len, num_heads, head_size = query.shape
    seq_len, num_kv_heads, _ = key.shape
    group = num_heads // num_kv_heads
    grouped = query.view(query_len, num_kv_heads, group, head_size)
    scores = torch.einsum("qgrd,lgd->grql", grouped, key) * scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    scores = scores.masked_fill(hidden_positions(query_len, seq_len, sliding_window, query.device), -math.inf)
    mixed = torch.einsum("grql,lgd->qgrd", scores.softmax(-1), value)
    return mixed.reshape(query_len, num_heads, head_size)


def hidden_positions(query_len: int, seq_len: int, sliding_window: int | None, device: torch.device) -> Tensor:
    """bool [Q,L]: which positions a query row may not see."""
    row = torch.arange(seq_len - query_len, seq_len, device=device)[:, None]
    column = torch.arange(seq_len, device=device)[None, :]
    hidden = column > row
    return hidden if sliding_window is None else hidden | (column <= row - sliding_window)
