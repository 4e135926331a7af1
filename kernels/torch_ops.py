"""Candidates in plain torch: they run on every device and stand behind all others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..platforms.spec import DeviceSpec
from ..quant.scheme import Dense
from . import reference
from .attention_batch import AttentionBatch
from .expert_loop import register_expert_loops
from .kv_layout import KVCache
from .problems import AttentionProblem, LinearProblem
from .quantized_linear import expanded_bytes, prepare_dense, register_quantized_ops
from .registry import Candidate, Quality, Registry


def register_torch_ops(registry: Registry, spec: DeviceSpec) -> None:
    """Append the torch candidate of every operation."""
    quality = Quality.NATIVE if spec.device_type == "cpu" else Quality.REFERENCE
    plain: dict[str, Callable[..., Any]] = {
        "rms_norm": reference.rms_norm,
        "add_rms_norm": reference.add_rms_norm,
        "rope": reference.rope,
        "silu_and_mul": reference.silu_and_mul,
        "gelu_and_mul": reference.gelu_and_mul,
        "write_kv": reference.write_kv,
        "copy_blocks": reference.copy_blocks,
        "moe_route": reference.route,
    }
    for op, run in plain.items():
        # Copying blocks is torch's own copy on every device: no kernel of ours would do better.
        kind = Quality.NATIVE if op == "copy_blocks" else quality
        registry.register(Candidate(op=op, name="torch", quality=kind, can_run=_always, run=run))
    registry.register(
        Candidate(op="paged_attention", name="torch_sdpa", quality=quality, can_run=_no_soft_cap, run=sdpa_attention)
    )
    registry.register(
        Candidate(
            op="paged_attention",
            name="torch",
            quality=Quality.REFERENCE,
            can_run=_always,
            run=reference.paged_attention,
        )
    )
    registry.register(
        Candidate(
            op="linear",
            name="torch_dense",
            quality=Quality.NATIVE,
            can_run=_only_dense,
            run=reference.linear,
            prepare=prepare_dense,
            prepared_bytes=expanded_bytes,
            shares_dense=True,
        )
    )
    register_quantized_ops(registry, spec)
    register_expert_loops(registry, spec)


def sdpa_attention(
    query: Tensor,
    cache: KVCache,
    batch: AttentionBatch,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float = 0.0,
) -> Tensor:
    """``reference.paged_attention`` without a soft cap, by torch's scaled_dot_product_attention per request."""
    assert not soft_cap, "sdpa_attention has no soft cap; can_run refuses such problems"
    output = torch.empty_like(query)
    block_size = cache.block_size
    start = 0
    for row, (query_len, seq_len) in enumerate(zip(batch.query_lens_host, batch.seq_lens_host, strict=True)):
        first = 0 if sliding_window is None else max(0, seq_len - query_len - sliding_window + 1) // block_size
        blocks = batch.block_table[row, first : -(-seq_len // block_size)].long()
        length = seq_len - first * block_size
        key, value = (_context(part, blocks, length, query.dtype) for part in (cache.key, cache.value))
        rows = slice(start, start + query_len)
        output[rows] = _sdpa(query[rows], key, value, scale, sliding_window)
        start += query_len
    return output


def _context(cache: Tensor, blocks: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """The first ``length`` tokens of the listed blocks, [1,G,L,D]."""
    return cache[blocks].flatten(0, 1)[:length].to(dtype).transpose(0, 1)[None]


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


def _always(spec: DeviceSpec, problem: Any) -> str | None:
    return None


def _no_soft_cap(spec: DeviceSpec, problem: AttentionProblem) -> str | None:
    return f"torch's SDPA has no soft cap ({problem.soft_cap:g})" if problem.soft_cap else None


def _only_dense(spec: DeviceSpec, problem: LinearProblem) -> str | None:
    return None if isinstance(problem.scheme, Dense) else f"the weight is {problem.scheme}, not dense"
