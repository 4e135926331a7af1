"""Attention in torch's own operations, for devices and problems that no kernel of ours takes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..platforms.spec import DeviceSpec
from . import reference
from .attention_batch import AttentionBatch
from .kv_layout import KVCache, is_scaled_dtype
from .problems import AttentionProblem, dtype_name
from .reference.kv_cache import dequantize_kv
from .registry import Candidate, Quality, Registry


def register_torch_attention(registry: Registry, quality: Quality) -> None:
    """Append torch's fused attention, the same after dequantizing a scaled cache, and the definition: it takes all."""
    rows = (
        ("torch_sdpa", quality, _sdpa_plain, sdpa_attention),
        ("torch_sdpa_dequantize", Quality.DEQUANTIZING, _sdpa_scaled, sdpa_attention),
        ("torch", Quality.REFERENCE, _anything, reference.paged_attention),
    )
    for name, kind, can_run, run in rows:
        registry.register(Candidate(op="paged_attention", name=name, quality=kind, can_run=can_run, run=run))


def sdpa_attention(
    query: Tensor,
    cache: KVCache,
    batch: AttentionBatch,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float = 0.0,
) -> Tensor:
    """``reference.paged_attention`` by torch's scaled_dot_product_attention per request; no soft cap.

    A scaled cache is dequantized, rounded to the query's dtype, one request's context at a time.
    """
    assert not soft_cap, "sdpa_attention has no soft cap; can_run refuses such problems"
    output = query.new_empty(*query.shape[:2], cache.value.shape[-1])
    block_size = cache.block_size
    start = 0
    for row, (query_len, seq_len) in enumerate(zip(batch.query_lens_host, batch.seq_lens_host, strict=True)):
        first = 0 if sliding_window is None else max(0, seq_len - query_len - sliding_window + 1) // block_size
        blocks = batch.block_table[row, first : -(-seq_len // block_size)].long()
        length = seq_len - first * block_size
        key = _context(cache.key, cache.key_scale, blocks, length, query.dtype)
        value = _context(cache.value, cache.value_scale, blocks, length, query.dtype)
        rows = slice(start, start + query_len)
        output[rows] = _sdpa(query[rows], key, value, scale, sliding_window)
        start += query_len
    return output


def _context(codes: Tensor, scale: Tensor | None, blocks: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """The first ``length`` tokens of the listed blocks, [1,G,L,D]."""
    values = codes[blocks] if scale is None else dequantize_kv(codes[blocks], scale[blocks])
    return values.flatten(0, 1)[:length].to(dtype).transpose(0, 1)[None]


def _sdpa(query: Tensor, key: Tensor, value: Tensor, scale: float, sliding_window: int | None) -> Tensor:
    query_len, length = query.shape[0], key.shape[2]
    mask = None
    if sliding_window is not None or 1 < query_len < length:
        mask = ~reference.hidden_positions(query_len, length, sliding_window, query.device)
    causal = mask is None and query_len == length > 1
    heads = query.transpose(0, 1)[None]
    group = heads.shape[1] // key.shape[1]
    if group > 1:
        key, value = (part.repeat_interleave(group, dim=1) for part in (key, value))
    mixed = F.scaled_dot_product_attention(heads, key, value, attn_mask=mask, is_causal=causal, scale=scale)
    return mixed[0].transpose(0, 1)


def _anything(spec: DeviceSpec, problem: AttentionProblem) -> str | None:
    return None


def _sdpa_plain(spec: DeviceSpec, problem: AttentionProblem) -> str | None:
    if is_scaled_dtype(problem.kv_dtype):
        return f"a {dtype_name(problem.kv_dtype)} cache has scales, which torch's SDPA does not know"
    return _why_no_sdpa(problem)


def _sdpa_scaled(spec: DeviceSpec, problem: AttentionProblem) -> str | None:
    if not is_scaled_dtype(problem.kv_dtype):
        return f"a {dtype_name(problem.kv_dtype)} cache has nothing to dequantize"
    return _why_no_sdpa(problem)


def _why_no_sdpa(problem: AttentionProblem) -> str | None:
    if problem.soft_cap:
        return f"torch's SDPA has no soft cap ({problem.soft_cap:g})"
    if problem.has_sinks:
        return "torch's SDPA has no attention sinks"
    return "torch's SDPA has no ALiBi" if problem.has_alibi else None
