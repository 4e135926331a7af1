"""8-bit weights: the scaled matmul, and operations whose results are quantized for it."""

from __future__ import annotations

import itertools
import math

import torch

from ...platforms.spec import DeviceSpec, Fp8Kind
from ...quant.scheme import Element, Fp8, Int8
from ..problems import LinearProblem, QuantizeProblem
from ..registry import Candidate, Quality, Registry
from .candidate_rules import Lazy, triton_candidate, why_no_matrix, why_not_here
from .launch_scaled import scaled_row
from .launch_table import Refused
from .scaled_weight import eight_bit_scheme, input_format, prepare_fnuz, prepare_native, prepare_wide, prepared_bytes

MIN_GROUP = 16
# Beyond, sums of int8 products can overflow int32.
MAX_INT8_FEATURES = 2**17 - 1
MAX_INT8_FEATURES_WITH_ZEROS = 2**16

_FUSED = ("rms_norm_quantized", "add_rms_norm_quantized", "silu_and_mul_quantized", "gelu_and_mul_quantized")


def register_scaled_ops(registry: Registry, spec: DeviceSpec) -> None:
    """Append the candidates for 8-bit weights and quantized results."""
    run = Lazy("scaled_linear", "scaled_linear")
    native = prepare_fnuz if spec.fp8 is Fp8Kind.FNUZ else prepare_native
    for name, quality, can_run, prepare in (
        ("triton_8bit", Quality.NATIVE, can_multiply_codes, native),
        ("triton_fp8_weights", Quality.NATIVE, can_decode_weights, prepare_wide),
        ("triton_fp8_emulated", Quality.EMULATED, can_emulate_codes, prepare_wide),
    ):
        registry.register(
            Candidate(
                op="linear",
                name=name,
                quality=quality,
                can_run=can_run,
                run=run,
                prepare=prepare,
                prepared_bytes=prepared_bytes,
                input_format=input_format,
            )
        )
    registry.register(
        triton_candidate("quantize_activation", can_quantize, Lazy("quantize_rows", "quantize_activation"))
    )
    for op in _FUSED:
        registry.register(triton_candidate(op, can_quantize_fused, Lazy("quantize_rows", op)))


def can_multiply_codes(spec: DeviceSpec, problem: LinearProblem) -> str | None:
    """int8 x int8, or fp8 x fp8 in the device's own 8-bit float."""
    scheme = eight_bit_scheme(problem.scheme)
    if scheme is None:
        return f"the weight is {problem.scheme}, not int8 or fp8"
    if scheme.activation is None:
        return f"{scheme} does not quantize activations"
    kind = Element.INT8 if isinstance(scheme, Int8) else Element.FP8
    if scheme.activation.element is not kind:
        return f"it multiplies {kind.value} weights with {kind.value} activations, not with {scheme.activation}"
    if kind.value not in spec.matrix_dtypes:
        return f"{spec.arch} has no {kind.value} matrix instructions"
    return _why_not_scaled(spec, problem, 1)


def can_decode_weights(spec: DeviceSpec, problem: LinearProblem) -> str | None:
    """fp8 weights, activations as they are."""
    scheme = eight_bit_scheme(problem.scheme)
    if not isinstance(scheme, Fp8):
        return f"the weight is {problem.scheme}, not fp8"
    if scheme.activation is not None:
        return f"it would leave out the activation quantization of {scheme}"
    return _why_not_scaled(spec, problem, problem.dtype.itemsize)


def can_emulate_codes(spec: DeviceSpec, problem: LinearProblem) -> str | None:
    """fp8 x fp8 where the device has no 8-bit float: the exact products, in the activations' dtype."""
    scheme = eight_bit_scheme(problem.scheme)
    if not isinstance(scheme, Fp8) or scheme.activation is None or scheme.activation.element is not Element.FP8:
        return f"the scheme is {problem.scheme}, not fp8 weights with fp8 activations"
    return _why_not_scaled(spec, problem, problem.dtype.itemsize)


def _why_not_scaled(spec: DeviceSpec, problem: LinearProblem, element_size: int) -> str | None:
    reason = why_not_here(spec, problem.dtype) or why_no_matrix(spec, problem.dtype)
    return reason or _why_no_shape(problem) or _why_no_row(spec, element_size)


def _why_no_shape(problem: LinearProblem) -> str | None:
    scheme, features = eight_bit_scheme(problem.scheme), problem.in_features
    assert scheme is not None, f"{problem.scheme} was refused before"
    grouped = scheme.num_blocks((problem.out_features, features))[1] > 1
    x_group = scheme.activation.group_size if scheme.activation is not None else 0
    common = math.gcd(scheme.resolved_block((problem.out_features, features))[1] if grouped else 0, max(0, x_group))
    if 0 < common < MIN_GROUP:
        return f"{common} features share their scales in weight and activations; it takes {MIN_GROUP} or more"
    if isinstance(scheme, Int8):
        symmetric = scheme.symmetric and scheme.activation.symmetric
        limit = MAX_INT8_FEATURES if symmetric else MAX_INT8_FEATURES_WITH_ZEROS
        if features > limit:
            return f"sums over {features} features can overflow int32; it takes up to {limit}"
    return None


def _why_no_row(spec: DeviceSpec, element_size: int) -> str | None:
    cases = itertools.product((1, 64, 256), (False, True))
    rows = (scaled_row(spec.arch, count, element_size, grouped=grouped) for count, grouped in cases)
    return next((row.reason for row in rows if isinstance(row, Refused)), None)


def can_quantize(spec: DeviceSpec, problem: QuantizeProblem) -> str | None:
    """Quantization to 8 bits, in groups of any size."""
    if problem.activation.bits != 8:
        return f"{problem.activation} has {problem.activation.bits} bits, not 8"
    own = {Fp8Kind.OCP: torch.float8_e4m3fn, Fp8Kind.FNUZ: torch.float8_e4m3fnuz}.get(spec.fp8)
    kind = problem.codes_dtype
    if kind.itemsize == 1 and kind is not torch.int8 and kind is not own:
        return f"{spec.arch} does not convert to {kind}"
    return why_not_here(spec, problem.dtype)


def can_quantize_fused(spec: DeviceSpec, problem: QuantizeProblem) -> str | None:
    """Quantization in the kernel that computes the values: it sees whole tokens, not all of them."""
    how = problem.activation
    if how.dynamic and how.group_size == 0:
        return f"{how} takes one scale from all tokens, each of which has its own program"
    if how.group_size > 0 and how.group_size & (how.group_size - 1):
        return f"groups of {how.group_size} do not fill a tile evenly; it takes powers of two"
    return can_quantize(spec, problem)
