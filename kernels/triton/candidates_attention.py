"""Attention, and the writes into its cache."""

from __future__ import annotations

import torch

from ...platforms.fp8 import fp8_dtype
from ...platforms.spec import DeviceSpec, Fp8Kind
from ..problems import AttentionProblem, KVWriteProblem, dtype_name
from ..registry import Registry
from .candidate_rules import DTYPES, Lazy, triton_candidate, why_no_matrix, why_not_here
from .launch_attention import LATENT_SIZES, attention_row
from .launch_table import Refused

HEAD_SIZES = range(16, 257)


def register_attention_ops(registry: Registry) -> None:
    """Append the candidates."""
    registry.register(triton_candidate("write_kv", can_run_kv_write, Lazy("write_kv", "write_kv")))
    fused = Lazy("rope_write_kv", "rope_write_kv")
    registry.register(triton_candidate("rope_write_kv", can_run_kv_write, fused))
    attend = Lazy("paged_attention", "paged_attention")
    registry.register(triton_candidate("paged_attention", can_run_attention, attend))


def can_run_kv_write(spec: DeviceSpec, problem: KVWriteProblem) -> str | None:
    """Writes into the cache, alone or behind rotary embedding: both dtypes."""
    return why_not_here(spec, problem.dtype) or _why_not_cached(spec, problem.kv_dtype)


def can_run_attention(spec: DeviceSpec, problem: AttentionProblem) -> str | None:
    """Paged attention: head sizes, dtypes, and the launch tables' refusals. Sinks, ALiBi, window and cap always run."""
    reason = why_not_here(spec, problem.dtype) or _why_not_cached(spec, problem.kv_dtype)
    reason = reason or why_no_matrix(spec, problem.dtype) or _why_not_heads(problem)
    if reason is not None:
        return reason
    size, element_size = max(problem.head_size, problem.value_size), problem.dtype.itemsize
    scaled = problem.kv_dtype.itemsize == 1
    rows = (attention_row(spec.arch, phase, size, element_size, scaled=scaled) for phase in ("decode", "prefill"))
    return next((row.reason for row in rows if isinstance(row, Refused)), None)


def _why_not_cached(spec: DeviceSpec, kv_dtype: torch.dtype) -> str | None:
    if kv_dtype in (*DTYPES, torch.int8):
        return None
    if spec.fp8 is Fp8Kind.NONE:
        return f"{spec.arch} has no 8-bit float for a {dtype_name(kv_dtype)} cache; int8 runs"
    native = fp8_dtype(spec.fp8)
    if kv_dtype is native:
        return None
    return (
        f"no Triton kernel for a {dtype_name(kv_dtype)} cache: the 8-bit float of {spec.arch} is {dtype_name(native)}"
    )


def _why_not_heads(problem: AttentionProblem) -> str | None:
    if problem.num_heads % problem.num_kv_heads:
        return f"{problem.num_heads} query heads do not share {problem.num_kv_heads} KV heads evenly"
    sizes = problem.head_size, problem.value_size
    if sizes == LATENT_SIZES:
        return None
    outside = next((size for size in sizes if size not in HEAD_SIZES), None)
    if outside is None:
        return None
    latent = " and ".join(map(str, LATENT_SIZES))
    return f"head size {outside} is not between {HEAD_SIZES.start} and {HEAD_SIZES.stop - 1} (nor latent, {latent})"
