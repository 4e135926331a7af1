"""The CPU platform's candidates, best first."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ...platforms.spec import DeviceSpec
from ...quant.scheme import Dense, Offset, WeightOnly
from ..problems import (
    AttentionProblem,
    KVWriteProblem,
    LinearProblem,
    MoeRouteProblem,
    PlainProblem,
    QuantizeProblem,
    SamplingProblem,
    dtype_name,
)
from ..registry import Candidate, Quality, Registry
from ..sampling_options import MAX_COLUMNS
from . import (
    attention,
    elementwise,
    embedding,
    fused,
    linear,
    linear_bf16,
    linear_int8,
    linear_rounded,
    route,
    sampling,
    small_floats,
)
from .cache_sizes import KV_DTYPES
from .library import unavailable_for
from .panels import stored_bits
from .words import offer_conversions


def register_cpu_ops(registry: Registry, *, activations: str = "exact") -> None:
    """Register the compiled kernels. ``activations`` int8 and bf16: also where a checkpoint does not ask for it."""
    offer_conversions()
    ops: dict[str, tuple[Callable[[DeviceSpec, Any], str | None], Callable[..., Any]]] = {
        "rms_norm": (_plain, elementwise.rms_norm),
        "add_rms_norm": (_plain, elementwise.add_rms_norm),
        "rope": (_plain, elementwise.rope),
        "silu_and_mul": (_plain, elementwise.silu_and_mul),
        "gelu_and_mul": (_plain, elementwise.gelu_and_mul),
        "soft_cap": (_plain, elementwise.soft_cap),
        "sigmoid_gate": (_plain, elementwise.sigmoid_gate),
        "embed_packed": (_plain, embedding.embed_packed),
        "moe_route": (_plain, route.moe_route),
        "argmax": (_sampling, sampling.argmax),
        "draw_tokens": (_sampling, sampling.draw_tokens),
        "edit_logits": (_sampling, sampling.edit_logits),
        "write_kv": (_kv_write, attention.write_kv),
        "paged_attention": (_attention, attention.paged_attention),
        "rope_write_attend": (_attention, fused.rope_write_attend),
    }
    for op, (can_run, run) in ops.items():
        registry.register(
            Candidate(op=op, name="c_float32", quality=Quality.NATIVE, can_run=can_run, run=run, own_threads=True)
        )
    _register_linear(registry, activations)


def _register_linear(registry: Registry, activations: str) -> None:
    product = partial(Candidate, op="linear", quality=Quality.NATIVE, own_threads=True)
    if activations == "bf16":
        registry.register(
            product(
                name="c_bf16",
                can_run=linear_bf16.why_not,
                run=linear_bf16.run,
                prepare=linear_bf16.prepare,
                prepared_bytes=linear_bf16.num_bytes,
                assemble=linear_bf16.Bf16Assembly,
                look_up=embedding.look_up_bf16,
                input_format=linear_bf16.input_dtype,
                run_gated={"silu": linear_bf16.run_gated},
            )
        )
        _register_rounding(registry)
    # Of inputs in 8 bits those of the head and of q, k and v cost answers most: half, for a sixth of the products.
    two_planes = product(
        name="c_int16_activations",
        can_run=linear_int8.why_not_two_planes,
        run=linear_int8.run,
        prepare=linear_int8.prepare_two_planes,
        prepared_bytes=linear.low_bit_bytes,
        assemble=linear_int8.two_planes,
        look_up=embedding.look_up,
    )
    for candidate in (
        product(
            name="c_dense_float32",
            can_run=_dense,
            run=linear.run,
            prepare=linear.prepare_dense,
            prepared_bytes=linear.dense_bytes,
            assemble=linear.DenseAssembly,
            look_up=embedding.look_up,
            run_gated=linear.gated(linear.run_gated),
        ),
        *([two_planes] if activations == "int8" else []),
        product(
            name="c_int8_activations",
            can_run=linear_int8.why_not if activations == "int8" else _int8_by_right,
            run=linear_int8.run,
            prepare=linear_int8.prepare,
            prepared_bytes=linear.low_bit_bytes,
            assemble=linear_int8.Int8Assembly,
            look_up=embedding.look_up,
            run_gated=linear.gated(linear_int8.run_gated),
        ),
        product(
            name="c_low_bit_float32",
            can_run=_low_bit,
            run=linear.run,
            prepare=linear.prepare_low_bit,
            prepared_bytes=linear.low_bit_bytes,
            assemble=linear.LowBitAssembly,
            look_up=embedding.look_up,
            run_gated=linear.gated(linear.run_gated),
        ),
        product(
            name="c_small_floats",
            can_run=small_floats.why_not,
            run=linear_rounded.run,
            prepare=small_floats.prepare,
            prepared_bytes=small_floats.num_bytes,
            assemble=small_floats.SmallFloatAssembly,
            run_gated=linear.gated(linear_rounded.run_gated),
        ),
        product(
            name="c_low_bit_rounded",
            can_run=linear_rounded.why_not,
            run=linear_rounded.run,
            prepare=linear_rounded.prepare,
            prepared_bytes=linear.low_bit_bytes,
            assemble=linear_rounded.RoundedAssembly,
            run_gated=linear.gated(linear_rounded.run_gated),
        ),
    ):
        registry.register(candidate)


def _register_rounding(registry: Registry) -> None:
    """Norms that round what they give to the products' bfloat16."""
    norms: dict[str, Callable[..., Any]] = {
        "rms_norm_quantized": elementwise.rms_norm_rounded,
        "add_rms_norm_quantized": elementwise.add_rms_norm_rounded,
    }
    for op, run in norms.items():
        registry.register(
            Candidate(op=op, name="c_bf16", quality=Quality.NATIVE, can_run=_rounding, run=run, own_threads=True)
        )


def _cache_dtype(dtype: torch.dtype) -> str | None:
    if dtype in KV_DTYPES:
        return None
    return f"caches are {', '.join(map(dtype_name, KV_DTYPES))} here, not {dtype_name(dtype)}"


def _plain(spec: DeviceSpec, problem: PlainProblem | MoeRouteProblem) -> str | None:
    return unavailable_for(problem.dtype)


def _rounding(spec: DeviceSpec, problem: QuantizeProblem) -> str | None:
    if problem.activation is not None or problem.codes_dtype is not torch.bfloat16:
        return "it rounds to bfloat16"
    return linear_bf16.missing() or unavailable_for(problem.dtype)


def _sampling(spec: DeviceSpec, problem: SamplingProblem) -> str | None:
    if problem.vocab_size > MAX_COLUMNS:
        return f"sums over {problem.vocab_size} tokens may overflow; it takes up to {MAX_COLUMNS}"
    return unavailable_for(problem.dtype)


def _kv_write(spec: DeviceSpec, problem: KVWriteProblem) -> str | None:
    return _cache_dtype(problem.kv_dtype) or unavailable_for(problem.dtype)


def _attention(spec: DeviceSpec, problem: AttentionProblem) -> str | None:
    if problem.has_sinks or problem.has_alibi:
        return f"it has no {'attention sinks' if problem.has_sinks else 'ALiBi'}"
    if problem.value_size != problem.head_size:
        return f"its values are as wide as its keys, not {problem.value_size} beside {problem.head_size}"
    return _cache_dtype(problem.kv_dtype) or unavailable_for(problem.dtype)


def _dense(spec: DeviceSpec, problem: LinearProblem) -> str | None:
    if not isinstance(problem.scheme, Dense):
        return f"the weight is {problem.scheme}, not dense"
    return unavailable_for(problem.dtype)


def _int8_by_right(spec: DeviceSpec, problem: LinearProblem) -> str | None:
    if isinstance(problem.scheme, WeightOnly | Offset):
        return "activations in 8 bits were not asked for (--cpu-activations int8)"
    return linear_int8.why_not(spec, problem)


def _low_bit(spec: DeviceSpec, problem: LinearProblem) -> str | None:
    scheme = problem.scheme
    if not isinstance(scheme, WeightOnly | Offset):
        return f"the weight is {scheme}, not weight-only integers"
    if not 2 <= scheme.bits <= 8:
        return f"it decodes 2 to 8 bits, not {scheme.bits}"
    if isinstance(scheme, Offset) and scheme.bits == 2:
        return "it adds offsets to 4 and 8 bits, not to 2"
    group_size = scheme.resolved_group_size(problem.in_features)
    per_word = 32 // stored_bits(scheme.bits)
    if group_size % per_word and group_size < problem.in_features:
        return f"groups of {group_size} do not end on a word of {per_word} codes"
    return unavailable_for(problem.dtype)
