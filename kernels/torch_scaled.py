"""torch's own products of 8-bit codes as linear candidates: ``_scaled_mm`` for fp8 and ``_int_mm`` for int8.

They stand behind the Triton kernels, and serve GPUs where triton is not installed or has no 8-bit product. Inputs are
quantized in plain torch unless they come quantized.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..platforms.spec import DeviceSpec, Fp8Kind
from ..quant.scheme import Element, Fp8, Int8
from . import reference
from .problems import LinearProblem, dtype_name
from .quantized_input import QuantizedInput
from .registry import Candidate, Quality, Registry
from .triton.scaled_weight import ScaledWeight, input_format, prepare_fnuz, prepare_native, prepared_bytes

# Architectures whose library multiplies fp8 with a scale per token and output feature.
ROW_WISE = ("sm_90", "sm_100", "sm_103", "gfx942", "gfx950")
# _int_mm asks for more than 16 rows.
MIN_INT8_ROWS = 32
SCALED_MULTIPLE, INT8_MULTIPLE = 16, 8


def register_torch_scaled(registry: Registry, spec: DeviceSpec) -> None:
    """Append the candidates."""
    fp8 = prepare_fnuz if spec.fp8 is Fp8Kind.FNUZ else prepare_native
    for name, can_run, run, prepare in (
        ("torch_scaled_mm", why_no_scaled_mm, run_scaled_mm, fp8),
        ("torch_int_mm", why_no_int_mm, run_int_mm, prepare_native),
    ):
        registry.register(
            Candidate(
                op="linear",
                name=name,
                quality=Quality.NATIVE,
                can_run=can_run,
                run=run,
                prepare=prepare,
                prepared_bytes=prepared_bytes,
                input_format=input_format,
            )
        )


def why_no_scaled_mm(spec: DeviceSpec, problem: LinearProblem) -> str | None:
    """fp8 codes with one scale each, or one per token and output feature."""
    scheme = problem.scheme
    if not isinstance(scheme, Fp8) or scheme.activation is None or scheme.activation.element is not Element.FP8:
        return f"the scheme is {scheme}, not fp8 weights with fp8 activations"
    if spec.fp8 is Fp8Kind.NONE:
        return f"{spec.arch} has no fp8 matrix instructions"
    reason = _why_no_shape(problem, SCALED_MULTIPLE)
    if reason is not None:
        return reason
    per_tensor = scheme.block == (-1, -1) and scheme.activation.group_size == 0
    if per_tensor:
        allowed = (torch.bfloat16, torch.float16)
        return None if problem.dtype in allowed else f"it has no results in {dtype_name(problem.dtype)}"
    if spec.arch not in ROW_WISE:
        return f"scales per token or output feature are served on {', '.join(ROW_WISE)}, not on {spec.arch}"
    return None if problem.dtype is torch.bfloat16 else f"such scales give bfloat16, not {dtype_name(problem.dtype)}"


def why_no_int_mm(spec: DeviceSpec, problem: LinearProblem) -> str | None:
    """int8 codes with a scale per token, or one, and per output feature."""
    scheme = problem.scheme
    if not isinstance(scheme, Int8) or scheme.activation.element is not Element.INT8:
        return f"the scheme is {scheme}, not int8 weights with int8 activations"
    if spec.device_type != "cuda" or "int8" not in spec.matrix_dtypes:
        return f"{spec.arch} has no int8 matrix instructions"
    if not scheme.symmetric:
        return "the weights have zero points"
    return _why_no_shape(problem, INT8_MULTIPLE)


def _why_no_shape(problem: LinearProblem, multiple: int) -> str | None:
    scheme, shape = problem.scheme, (problem.out_features, problem.in_features)
    if scheme.num_blocks(shape)[1] > 1 or scheme.activation.group_size > 0:
        return f"scales of {scheme} change along the input features"
    if shape[0] % multiple or shape[1] % multiple:
        return f"{shape[0]} x {shape[1]} are not both multiples of {multiple}"
    return None


def fits_scaled_mm(prepared: ScaledWeight, dtype: torch.dtype) -> bool:
    """Whether ``run_scaled_mm`` takes a weight and inputs of ``dtype`` with any of its kinds of scales."""
    is_fp8 = prepared.codes.dtype in (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
    fits = all(side % SCALED_MULTIPLE == 0 for side in prepared.shape) and not prepared.is_grouped
    return (
        is_fp8 and fits and dtype is torch.bfloat16 and (prepared.input is None or prepared.input.how.group_size <= 0)
    )


def run_scaled_mm(x: Tensor | QuantizedInput, prepared: ScaledWeight, bias: Tensor | None = None) -> Tensor:
    """x [T,K] -> [T,N] in x's dtype."""
    shape, quantized = x.shape, _quantized(x, prepared)
    if quantized.shape[0] == 0:
        return torch.empty((*shape[:-1], prepared.shape[0]), dtype=x.dtype, device=quantized.codes.device)
    scales, x_scale = prepared.scales, quantized.scale
    if prepared.per_tensor and x_scale.numel() == 1:
        scales, x_scale = scales[0, 0], x_scale[0, 0]
    else:
        x_scale = x_scale.expand(quantized.shape[0], 1).contiguous()
    product = torch._scaled_mm(
        quantized.codes, prepared.codes.t(), scale_a=x_scale, scale_b=scales, bias=bias, out_dtype=quantized.dtype
    )
    return product.view(*shape[:-1], prepared.shape[0])


def run_int_mm(x: Tensor | QuantizedInput, prepared: ScaledWeight, bias: Tensor | None = None) -> Tensor:
    """x [T,K] -> [T,N] in x's dtype; the sums are exact."""
    shape, quantized = x.shape, _quantized(x, prepared)
    rows = quantized.shape[0]
    codes = F.pad(quantized.codes, (0, 0, 0, max(0, MIN_INT8_ROWS - rows)))
    sums = torch._int_mm(codes, prepared.codes.t())[:rows]
    if quantized.zero is not None and prepared.sums is not None:
        sums = sums - quantized.zero * prepared.sums
    result = sums.float() * quantized.scale * prepared.scales
    result = (result if bias is None else result + bias.float()).to(quantized.dtype)
    return result.view(*shape[:-1], prepared.shape[0])


def _quantized(x: Tensor | QuantizedInput, prepared: ScaledWeight) -> QuantizedInput:
    if isinstance(x, QuantizedInput):
        return x
    wanted = prepared.input
    assert wanted is not None, "its input is not quantized; can_run refuses such schemes"
    rows = x.reshape(-1, x.shape[-1])
    return reference.quantize_activation(rows, wanted.how, wanted.scale, wanted.zero, codes_dtype=wanted.codes_dtype)
