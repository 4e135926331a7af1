"""Every operation in plain torch: the definition of right, and what runs where nothing better can.

Device-agnostic and without host synchronization. Arithmetic is in float32 (float64 for float64 input) and rounded once
to the input's dtype. Shape legend in attention_batch.py.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .attention_batch import AttentionBatch


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype is torch.float64 else x.float()


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """x [T,K] / rms(x) * (weight [K] + offset) -> [T,K]. Gemma stores weight - 1 and passes offset 1."""
    wide = _wide(x)
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed * (weight.to(wide.dtype) + offset)).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual); all [T,K]. A faster kernel may write the sum over ``residual``."""
    total = x + residual
    return rms_norm(total, weight, eps, offset), total


def rope(q: Tensor, k: Tensor, cos_sin: Tensor, positions: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Rotary position embedding (arXiv:2104.09864).

    q [T,H,D], k [T,G,D]; cos_sin float32 [P,R], the R/2 cosines and then the R/2 sines of each position; positions
    int64 [T]. Rotates the first R of D; pairs are (i, i+R/2), or (2i, 2i+1) when ``interleaved``. May be done in place.
    """
    half = cos_sin.shape[-1] // 2
    table = cos_sin[positions][:, None, :]
    cos, sin = table[..., :half], table[..., half:]
    return _rotate(q, cos, sin, interleaved), _rotate(k, cos, sin, interleaved)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    size = 2 * cos.shape[-1]
    wide = _wide(x[..., :size])
    cos, sin = cos.to(wide.dtype), sin.to(wide.dtype)
    if interleaved:
        first, second = wide[..., 0::2], wide[..., 1::2]
        rotated = torch.stack((first * cos - second * sin, second * cos + first * sin), -1).flatten(-2)
    else:
        first, second = wide.chunk(2, -1)
        rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    return torch.cat((rotated.to(x.dtype), x[..., size:]), -1)


def silu_and_mul(x: Tensor) -> Tensor:
    """silu(gate) * up with x [T,2I] = gate | up -> [T,I]."""
    gate, up = _wide(x).chunk(2, -1)
    return (F.silu(gate) * up).to(x.dtype)


def gelu_and_mul(x: Tensor, approximate: str = "none") -> Tensor:
    """gelu(gate) * up with x [T,2I] = gate | up -> [T,I]; ``approximate`` is ``none`` or ``tanh``."""
    gate, up = _wide(x).chunk(2, -1)
    return (F.gelu(gate, approximate=approximate) * up).to(x.dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T,K] @ weight [N,K].T + bias [N] -> [T,N]."""
    return F.linear(x, weight, bias)


def write_kv(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """Store key and value [T,G,D] at slots ``block * S + offset`` (int64 [T]) of the caches [N,S,G,D]."""
    block_size = key_cache.shape[1]
    blocks = torch.div(slot_mapping, block_size, rounding_mode="floor")
    offsets = slot_mapping - blocks * block_size
    key_cache[blocks, offsets] = key.to(key_cache.dtype)
    value_cache[blocks, offsets] = value.to(value_cache.dtype)


def copy_blocks(caches: list[Tensor], pairs: list[tuple[int, int]]) -> None:
    """In each cache [N,S,G,D] copy block ``source`` over block ``target`` for each (source, target).

    All sources are read before any target is written.
    """
    if not pairs:
        return
    sources, targets = (list(column) for column in zip(*pairs, strict=True))
    for cache in caches:
        cache[targets] = cache[sources]


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
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
    block_size = key_cache.shape[1]
    start = 0
    for row, (query_len, seq_len) in enumerate(zip(batch.query_lens_host, batch.seq_lens_host, strict=True)):
        blocks = batch.block_table[row, : -(-seq_len // block_size)].long()
        key = _wide(key_cache[blocks].flatten(0, 1)[:seq_len])
        value = _wide(value_cache[blocks].flatten(0, 1)[:seq_len])
        rows = slice(start, start + query_len)
        output[rows] = _attend(_wide(query[rows]), key, value, scale, sliding_window, soft_cap).to(query.dtype)
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
