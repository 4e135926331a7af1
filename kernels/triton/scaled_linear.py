"""Matrix product with 8-bit weights and their scales: y = x @ W.T (+ bias).

    codes x codes     int8 x int8 summed in int32, or fp8 x fp8 in float32, on the chip's 8-bit matrix instructions
    floats x fp8      e4m3 bits become floats of x's dtype in registers: weights alone in 8 bits, or (with inputs whose
                      codes are kept in such floats) the exact product of codes on chips without 8-bit floats
    scales            of x: one, per token, per group; of W: per output feature, per group, per block

Cost: reads N K bytes of codes once per ``block_m`` rows of x, and T K elements of x once per ``block_n`` outputs; the
scales are small beside them. 2 T N K operations, and about 5 per code where bits are decoded. With few rows K is
split, as in the packed matmul.

Where all of K shares its scales they meet the sums at the end; else they meet the product of each step. Groups that
no step divides are padded to whole steps with zeros.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..quantized_input import QuantizedInput
from ..torch_scaled import fits_scaled_mm, run_scaled_mm
from .launch_scaled import scaled_launch, vendor_rows
from .launch_table import LinearLaunch
from .packed_linear import add_splits, num_splits
from .quantize_rows import quantize_activation
from .runtime import device_arch, num_cores
from .scaled_weight import ScaledWeight

MIN_BLOCK_K = 32


@triton.jit
def decode_e4m3(codes: tl.tensor) -> tl.tensor:
    """float16 values of e4m3fn's bits, divided by 256: the exponent's bias is 15 instead of 7."""
    bits = codes.to(tl.int16)
    return (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)


@triton.jit
def num_steps(K: tl.tensor, common: tl.tensor, GROUPING: tl.constexpr, BLOCK_K: tl.constexpr) -> tl.tensor:
    """Steps of ``scaled_product`` over all of K."""
    if GROUPING == "padded":
        steps = tl.cdiv(K, common) * tl.cdiv(common, BLOCK_K)
    else:
        steps = tl.cdiv(K, BLOCK_K)
    return steps


@triton.jit
def scaled_product(
    x_rows: tl.tensor,
    x_scale_rows: tl.tensor,
    x_zero_rows: tl.tensor,
    row_mask: tl.tensor,
    code_rows: tl.tensor,
    scales_ptr: tl.tensor,
    zeros_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    outputs: tl.tensor,
    output_mask: tl.tensor,
    first_step: tl.tensor,
    last_step: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    common: tl.tensor,
    x_group: tl.tensor,
    group: tl.tensor,
    scale_rows: tl.tensor,
    scale_row_stride: tl.tensor,
    KIND: tl.constexpr,
    GROUPING: tl.constexpr,
    X_SCALED: tl.constexpr,
    X_ZEROS: tl.constexpr,
    W_ZEROS: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> tl.tensor:
    """float32 [BLOCK_M, BLOCK_N]: inputs at ``x_rows`` [BLOCK_M, 1] times codes at ``code_rows`` [BLOCK_N, 1], scaled,
    over some steps of K. Scales and zeros of the inputs are at ``x_scale_rows`` and ``x_zero_rows`` [BLOCK_M]."""
    scale_columns = outputs // scale_rows
    whole: tl.constexpr = GROUPING == "whole"
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.int32 if KIND == "int8" and whole else tl.float32)
    row_sums = tl.zeros([BLOCK_M], dtype=tl.int32)
    steps_per_group = tl.cdiv(common, BLOCK_K)
    for step in range(first_step, last_step):
        start = step * BLOCK_K
        end = K
        if GROUPING == "padded":
            start = (step // steps_per_group) * common + (step % steps_per_group) * BLOCK_K
            end = tl.minimum((step // steps_per_group + 1) * common, K)
        columns = start + tl.arange(0, BLOCK_K)
        x_mask = row_mask[:, None]
        code_mask = output_mask[:, None]
        if not EVEN_K:
            x_mask = x_mask & (columns < end)[None, :]
            code_mask = code_mask & (columns < end)[None, :]
        x = tl.load(x_rows + columns[None, :], mask=x_mask, other=0.0)
        codes = tl.load(code_rows + columns[None, :], mask=code_mask, other=0.0)
        if KIND == "bits":
            codes = decode_e4m3(codes)
            if x.dtype != tl.float16:
                codes = codes.to(tl.float32).to(x.dtype)
        if whole:
            if KIND == "fp8":
                acc = tl.dot(x, tl.trans(codes), acc, max_num_imprecise_acc=BLOCK_K)
            elif KIND == "int8":
                acc = tl.dot(x, tl.trans(codes), acc, out_dtype=tl.int32)
            else:
                acc = tl.dot(x, tl.trans(codes), acc, input_precision="ieee")
            if W_ZEROS:
                row_sums += tl.sum(x.to(tl.int32), axis=1)
        else:
            if KIND == "int8":
                product = tl.dot(x, tl.trans(codes), out_dtype=tl.int32)
            else:
                product = tl.dot(x, tl.trans(codes), input_precision="ieee")
            w_where = (start // group) * scale_row_stride + scale_columns
            if W_ZEROS:
                zeros = tl.load(zeros_ptr + w_where, mask=output_mask, other=0)
                product -= tl.sum(x.to(tl.int32), axis=1)[:, None] * zeros[None, :]
            if X_ZEROS:
                # The sums are of the whole group: they count once, in its first step.
                counts = output_mask & ((start + outputs * 0) % common == 0)
                sums = tl.load(sums_ptr + (start // common) * N + outputs, mask=counts, other=0)
                x_zeros = tl.load(x_zero_rows + start // x_group, mask=row_mask, other=0)
                product -= x_zeros[:, None] * sums[None, :]
            scaled = product.to(tl.float32) * tl.load(scales_ptr + w_where, mask=output_mask, other=0.0)[None, :]
            if X_SCALED:
                scaled *= tl.load(x_scale_rows + start // x_group, mask=row_mask, other=0.0)[:, None]
            acc += scaled
    if whole:
        if W_ZEROS:
            zeros = tl.load(zeros_ptr + scale_columns, mask=output_mask, other=0)
            acc -= row_sums[:, None] * zeros[None, :]
        if X_ZEROS:
            # The sums are of all of K: they count once, in the first of its splits.
            counts = output_mask & (first_step + outputs * 0 == 0)
            sums = tl.load(sums_ptr + outputs, mask=counts, other=0)
            acc -= tl.load(x_zero_rows, mask=row_mask, other=0)[:, None] * sums[None, :]
        acc = acc.to(tl.float32) * tl.load(scales_ptr + scale_columns, mask=output_mask, other=0.0)[None, :]
        if X_SCALED:
            acc *= tl.load(x_scale_rows, mask=row_mask, other=0.0)[:, None]
    return acc


@triton.jit
def scaled_linear_kernel(
    x_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    x_scale_ptr: tl.tensor,
    x_zero_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    zeros_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_rows: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    common: tl.tensor,
    x_group: tl.tensor,
    group: tl.tensor,
    scale_rows: tl.tensor,
    scale_row_stride: tl.tensor,
    x_scale_row_stride: tl.tensor,
    steps_per_split: tl.tensor,
    x_row_stride: tl.tensor,
    KIND: tl.constexpr,
    GROUPING: tl.constexpr,
    X_SCALED: tl.constexpr,
    X_ZEROS: tl.constexpr,
    W_ZEROS: tl.constexpr,
    EVEN_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    # Row tiles are the fastest axis: programs that run together share a tile of the weight.
    rows = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_mask = rows < num_rows
    output_mask = outputs < N
    x_rows = x_ptr + rows[:, None] * x_row_stride
    code_rows = codes_ptr + outputs.to(tl.int64)[:, None] * K
    first_step = 0
    last_step = num_steps(K, common, GROUPING, BLOCK_K)
    if SPLIT:
        first_step = tl.program_id(2) * steps_per_split
        last_step = tl.minimum(first_step + steps_per_split, last_step)
    acc = scaled_product(
        x_rows, x_scale_ptr + rows * x_scale_row_stride, x_zero_ptr + rows * x_scale_row_stride, row_mask, code_rows,
        scales_ptr, zeros_ptr, sums_ptr, outputs, output_mask, first_step, last_step, N, K, common, x_group, group,
        scale_rows, scale_row_stride, KIND, GROUPING, X_SCALED, X_ZEROS, W_ZEROS, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    out_rows = rows
    if SPLIT:
        out_rows = tl.program_id(2).to(tl.int64) * num_rows + rows
    elif HAS_BIAS:
        acc += tl.load(bias_ptr + outputs, mask=output_mask, other=0.0).to(tl.float32)[None, :]
    target = out_ptr + out_rows[:, None] * N + outputs[None, :]
    tl.store(target, acc.to(out_ptr.dtype.element_ty), mask=row_mask[:, None] & output_mask[None, :])


def constants(launch: LinearLaunch, codes_dtype: torch.dtype, features: int, common: int) -> dict[str, Any]:
    """The compile-time arguments that follow from the scheme, K and the launch row."""
    whole = common >= features
    block_k = launch.block_k if whole else _block_k(common, launch.block_k)
    kinds = {torch.int8: "int8", torch.uint8: "bits"}
    aligned = common % block_k == 0
    return {
        "KIND": kinds.get(codes_dtype, "fp8"),
        "GROUPING": "whole" if whole else "aligned" if aligned else "padded",
        "EVEN_K": features % block_k == 0 and (whole or aligned),
        "BLOCK_M": launch.block_m,
        "BLOCK_N": launch.block_n,
        "BLOCK_K": block_k,
    }


def _block_k(common: int, most: int) -> int:
    """Features per step: a divisor of the group where one is large enough, else enough to hold it."""
    divisor = common & -common
    return min(divisor if divisor >= MIN_BLOCK_K else max(MIN_BLOCK_K, triton.next_power_of_2(common)), most)


def scaled_linear(x: Tensor | QuantizedInput, prepared: ScaledWeight, bias: Tensor | None = None) -> Tensor:
    """x [..., K], or already quantized [T,K] as ``prepared.input`` says, times the weight [N,K], plus ``bias`` [N]."""
    shape = x.shape
    rows = x.reshape(-1, shape[-1]) if isinstance(x, Tensor) else x
    if isinstance(rows, Tensor) and prepared.input is not None:
        wanted = prepared.input
        rows = quantize_activation(rows, wanted.how, wanted.scale, wanted.zero, codes_dtype=wanted.codes_dtype)
    return _product(rows, prepared, bias).view(*shape[:-1], prepared.shape[0])


def _product(x: Tensor | QuantizedInput, prepared: ScaledWeight, bias: Tensor | None) -> Tensor:
    """The vendor's product for many rows, where there is one; else the kernel, K split for few rows."""
    codes = x if isinstance(x, Tensor) else x.codes
    arch, num_rows = device_arch(codes.device), codes.shape[0]
    many = vendor_rows(arch)
    if many is not None and num_rows >= many and fits_scaled_mm(prepared, x.dtype):
        return run_scaled_mm(x, prepared, bias)
    ways = {"grouped": prepared.is_grouped, "corrected": prepared.is_corrected}
    launch = scaled_launch(arch, num_rows, codes.element_size(), **ways)
    return launch_scaled(
        x, prepared, bias, launch, num_splits(num_rows, prepared.shape, launch, num_cores(codes.device))
    )


def launch_scaled(
    x: Tensor | QuantizedInput, prepared: ScaledWeight, bias: Tensor | None, launch: LinearLaunch, splits: int
) -> Tensor:
    """x [T,K] through the kernel, with the launch row and the number of parts of K given."""
    quantized = x if isinstance(x, QuantizedInput) else None
    codes = x if isinstance(x, Tensor) else x.codes
    (num_rows, features), outputs = codes.shape, prepared.shape[0]
    assert features == prepared.shape[1], f"x has {features} features, the weight {prepared.shape[1]}"
    out = torch.empty((num_rows, outputs), dtype=x.dtype, device=codes.device)
    if out.numel() == 0:
        return out
    if codes.stride(1) != 1:
        codes = codes.contiguous()
    values = constants(launch, prepared.codes.dtype, features, prepared.common)
    steps = triton.cdiv(features, prepared.common) * triton.cdiv(prepared.common, values["BLOCK_K"])
    target = out if splits == 1 else torch.empty((splits, *out.shape), dtype=torch.float32, device=codes.device)
    x_scale = prepared.scales if quantized is None else quantized.scale
    x_zero = None if quantized is None else quantized.zero
    scaled_linear_kernel[(triton.cdiv(num_rows, launch.block_m), triton.cdiv(outputs, launch.block_n), splits)](
        codes,
        prepared.codes,
        x_scale,
        x_scale if x_zero is None else x_zero,
        prepared.scales,
        prepared.scales if prepared.zeros is None else prepared.zeros,
        prepared.scales if prepared.sums is None else prepared.sums,
        prepared.scales if bias is None else bias,
        target,
        num_rows,
        outputs,
        features,
        prepared.common,
        features if quantized is None else quantized.group_size,
        prepared.group,
        prepared.rows,
        prepared.scales.shape[1],
        0 if x_scale.shape[0] == 1 and (quantized is None or quantized.how.group_size == 0) else x_scale.shape[1],
        triton.cdiv(steps, splits),
        codes.stride(0),
        X_SCALED=quantized is not None,
        X_ZEROS=x_zero is not None,
        W_ZEROS=prepared.zeros is not None,
        HAS_BIAS=bias is not None,
        SPLIT=splits > 1,
        **values,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        **launch.options,
    )
    if splits > 1:
        add_splits(target, bias, out)
    return out
