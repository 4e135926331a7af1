"""Candidates in plain torch: they run on every device and stand behind all others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..platforms.spec import DeviceSpec
from ..quant.scheme import Dense
from . import reference
from .expert_loop import register_expert_loops
from .problems import LinearProblem
from .quantized_linear import expanded_bytes, prepare_dense, register_quantized_ops
from .registry import Candidate, Quality, Registry
from .torch_attention import register_torch_attention
from .torch_scaled import register_torch_scaled


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
        "argmax": reference.argmax,
        "draw_tokens": reference.draw_tokens,
        "edit_logits": reference.edit_logits,
        "lora_shrink": reference.lora_shrink,
        "lora_expand": reference.lora_expand,
        "moe_route": reference.route,
    }
    for op, run in plain.items():
        # Copying blocks is torch's own copy on every device: no kernel of ours would do better.
        kind = Quality.NATIVE if op == "copy_blocks" else quality
        registry.register(Candidate(op=op, name="torch", quality=kind, can_run=_always, run=run))
    register_torch_attention(registry, quality)
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
    if spec.device_type != "cpu":
        register_torch_scaled(registry, spec)
    register_quantized_ops(registry, spec)
    register_expert_loops(registry, spec)


def _always(spec: DeviceSpec, problem: Any) -> str | None:
    return None


def _only_dense(spec: DeviceSpec, problem: LinearProblem) -> str | None:
    return None if isinstance(problem.scheme, Dense) else f"the weight is {problem.scheme}, not dense"
