"""Attention over the paged KV cache."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..attention_batch import AttentionBatch
from ..kv_layout import KVCache
from .kv_cache import dequantize_kv
from .precision import wide


def paged_attention(
    query: Tensor,
    cache: KVCache,
    batch: AttentionBatch,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float = 0.0,
    *,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
) -> Tensor:
    """Causal attention of query [T,H,D] over the cached context of its request -> [T,H,Dv].

    The last query row of a request stands at position seq_len - 1. Scores are ``scale * q.k``, capped to
    ``soft_cap * tanh(score / soft_cap)`` when soft_cap is not 0; a token sees itself and ``sliding_window - 1`` before
    it. ``alibi_slopes`` [H] (arXiv:2108.12409) then add ``slope * (column - row)``. ``sinks`` [H] (arXiv:2309.17453)
    are one more score for every row of a head, which takes its share of the softmax and adds nothing to the sum.
    """
    output = query.new_empty(*query.shape[:2], cache.value.shape[-1])
    start = 0
    for row, (query_len, seq_len) in enumerate(zip(batch.query_lens_host, batch.seq_lens_host, strict=True)):
        blocks = batch.block_table[row, : -(-seq_len // cache.block_size)].long()
        key = _context(cache.key, cache.key_scale, blocks, seq_len)
        value = _context(cache.value, cache.value_scale, blocks, seq_len)
        rows = slice(start, start + query_len)
        scores = _scores(wide(query[rows]), key, scale, soft_cap, alibi_slopes)
        scores = scores.masked_fill(hidden_positions(query_len, seq_len, sliding_window, query.device), -math.inf)
        output[rows] = _mix(scores, value, sinks).to(query.dtype)
        start += query_len
    return output


def _context(codes: Tensor, scale: Tensor | None, blocks: Tensor, seq_len: int) -> Tensor:
    """The dequantized tokens [L,G,D] of one request."""
    values = dequantize_kv(codes[blocks], None if scale is None else scale[blocks])
    return values.flatten(0, 1)[:seq_len]


def _scores(query: Tensor, key: Tensor, scale: float, soft_cap: float, alibi_slopes: Tensor | None) -> Tensor:
    """query [Q,H,D] and key [L,G,D] -> [H,Q,L]; head h reads KV head h // (H/G)."""
    (query_len, num_heads, _), (seq_len, num_kv_heads, _) = query.shape, key.shape
    grouped = query.unflatten(1, (num_kv_heads, num_heads // num_kv_heads))
    scores = torch.einsum("qgrd,lgd->grql", grouped, key.to(query.dtype)).flatten(0, 1) * scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    if alibi_slopes is None:
        return scores
    row = torch.arange(seq_len - query_len, seq_len, device=query.device)[:, None]
    distance = torch.arange(seq_len, device=query.device)[None, :] - row
    return scores + alibi_slopes.to(scores.dtype)[:, None, None] * distance


def _mix(scores: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax of scores [H,Q,L] times value [L,G,Dv] -> [Q,H,Dv]."""
    num_heads, query_len, seq_len = scores.shape
    if sinks is not None:
        column = sinks.to(scores.dtype)[:, None, None].expand(num_heads, query_len, 1)
        scores = torch.cat((scores, column), -1)
    weights = scores.softmax(-1)[..., :seq_len].unflatten(0, (value.shape[1], -1))
    return torch.einsum("grql,lgd->qgrd", weights, value.to(weights.dtype)).flatten(1, 2)


def hidden_positions(query_len: int, seq_len: int, sliding_window: int | None, device: torch.device) -> Tensor:
    """bool [Q,L]: which positions a query row may not see."""
    row = torch.arange(seq_len - query_len, seq_len, device=device)[:, None]
    column = torch.arange(seq_len, device=device)[None, :]
    hidden = column > row
    return hidden if sliding_window is None else hidden | (column <= row - sliding_window)
