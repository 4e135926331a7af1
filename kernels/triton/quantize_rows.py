"""Quantized activations: a row, or what RMSNorm, add-and-RMSNorm or a gated activation makes of it, to 8-bit codes.

    codes [T,K] and float32 scales (int32 zeros) [1,1], [T,1] or [T,K/group]     values = (code - zero) * scale

The fused forms round the value to x's dtype before quantizing it, as the operation by itself would, and save writing
and reading it: per row of K they read K (gated: 2 K; with a residual: 2 K, and write K) elements of x's dtype and write
K bytes of codes. About 10 operations an element. Rows of up to ``MAX_TILE`` elements are read once; longer ones once
per pass, from cache. One dynamic scale for everything takes a pass over x before.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ...quant.scheme import Activation, Element
from ..quantized_input import InputFormat, QuantizedInput
from .activations import activate
from .launch_table import row_launch
from .quantize_codes import codes_of, element_constants, scale_and_zero
from .rms_norm import MAX_TILE
from .runtime import device_arch

RANGE_BLOCK = 4096
MAX_RANGES = 512


@triton.jit
def source_values(
    x_rows: tl.tensor,
    residual_rows: tl.tensor,
    columns: tl.tensor,
    mask: tl.tensor,
    K: tl.constexpr,
    SOURCE: tl.constexpr,
) -> tl.tensor:
    """float32 values of a tile, rounded to their dtype, before a norm."""
    x = tl.load(x_rows + columns, mask=mask, other=0.0)
    dtype = x.dtype
    values = x.to(tl.float32)
    if SOURCE == "add_norm":
        values += tl.load(residual_rows + columns, mask=mask, other=0.0).to(tl.float32)
        values = values.to(residual_rows.dtype.element_ty).to(tl.float32)
    elif SOURCE != "plain" and SOURCE != "norm":
        up = tl.load(x_rows + K + columns, mask=mask, other=0.0).to(tl.float32)
        values = (activate(values, SOURCE) * up).to(dtype).to(tl.float32)
    return values


@triton.jit
def normalized(
    values: tl.tensor,
    factor: tl.tensor,
    weight_ptr: tl.tensor,
    columns: tl.tensor,
    offset: tl.tensor,
    K: tl.constexpr,
    dtype: tl.constexpr,
) -> tl.tensor:
    weight = tl.load(weight_ptr + columns, mask=columns < K, other=0.0).to(tl.float32) + offset
    return (values * factor[:, None] * weight).to(dtype).to(tl.float32)


@triton.jit
def store_tile(
    values: tl.tensor,
    scale: tl.tensor,
    zero: tl.tensor,
    rows: tl.tensor,
    row_mask: tl.tensor,
    start: tl.tensor,
    codes_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    zero_ptr: tl.tensor,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    ELEMENT: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    LIMIT: tl.constexpr,
    MAX_EXPONENT: tl.constexpr,
) -> None:
    """Quantize a tile with the scale of its row, or (``GROUP``) with those of its groups, which are stored as well."""
    columns = start + tl.arange(0, BLOCK_K)[None, :]
    if GROUP:
        grouped = tl.reshape(values, [BLOCK_ROWS, BLOCK_K // GROUP, GROUP])
        low, high = tl.min(grouped, axis=2), tl.max(grouped, axis=2)
        group_scale, group_zero = scale_and_zero(low, high, SYMMETRIC, POWER_OF_TWO, LIMIT, MAX_EXPONENT)
        groups = start // GROUP + tl.arange(0, BLOCK_K // GROUP)[None, :]
        where = rows[:, None] * tl.cdiv(K, GROUP) + groups
        mask = row_mask[:, None] & (groups * GROUP < K)
        tl.store(scale_ptr + where, group_scale, mask=mask)
        if not SYMMETRIC:
            tl.store(zero_ptr + where, group_zero.to(tl.int32), mask=mask)
        codes = codes_of(grouped, group_scale[:, :, None], group_zero[:, :, None], ELEMENT, SYMMETRIC, LIMIT)
        codes = tl.reshape(codes, [BLOCK_ROWS, BLOCK_K])
    else:
        codes = codes_of(values, scale[:, None], zero[:, None], ELEMENT, SYMMETRIC, LIMIT)
    target = codes_ptr + rows[:, None] * K + columns
    mask = row_mask[:, None] & (columns < K)
    if ELEMENT == "int8":
        tl.store(target, codes.to(tl.int32).to(tl.int8), mask=mask)
    else:
        tl.store(target, codes.to(codes_ptr.dtype.element_ty), mask=mask)


@triton.jit
def quantize_rows_kernel(
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    new_residual_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    zero_ptr: tl.tensor,
    static_scale_ptr: tl.tensor,
    static_zero_ptr: tl.tensor,
    range_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_ranges: tl.tensor,
    x_row_stride: tl.tensor,
    eps: tl.tensor,
    offset: tl.tensor,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    RANGES: tl.constexpr,
    SOURCE: tl.constexpr,
    GRAIN: tl.constexpr,
    GROUP: tl.constexpr,
    ELEMENT: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    LIMIT: tl.constexpr,
    MAX_EXPONENT: tl.constexpr,
) -> None:
    NORM: tl.constexpr = SOURCE == "norm" or SOURCE == "add_norm"
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    rows = (tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
    row_mask = rows < num_rows
    x_rows = x_ptr + (rows * x_row_stride)[:, None]
    residual_rows = residual_ptr + (rows * K)[:, None]
    columns = tl.arange(0, BLOCK_K)[None, :]
    mask = row_mask[:, None] & (columns < K)
    ones = tl.full([BLOCK_ROWS], 1.0, dtype=tl.float32)
    factor, scale, zero = ones, ones, ones * 0.0
    if GRAIN == "static":
        scale = ones * tl.load(static_scale_ptr)
        if not SYMMETRIC:
            zero = ones * tl.load(static_zero_ptr)
    elif GRAIN == "tensor":
        parts = tl.arange(0, RANGES)
        low = tl.min(tl.load(range_ptr + 2 * parts, mask=parts < num_ranges, other=0.0), axis=0)
        high = tl.max(tl.load(range_ptr + 2 * parts + 1, mask=parts < num_ranges, other=0.0), axis=0)
        scale, zero = scale_and_zero(ones * low, ones * high, SYMMETRIC, POWER_OF_TWO, LIMIT, MAX_EXPONENT)
    if BLOCK_K >= K:
        values = source_values(x_rows, residual_rows, columns, mask, K, SOURCE)
        if SOURCE == "add_norm":
            tl.store(
                new_residual_ptr + rows[:, None] * K + columns, values.to(residual_ptr.dtype.element_ty), mask=mask
            )
        if NORM:
            factor = 1.0 / tl.sqrt(tl.sum(values * values, axis=1) / K + eps)
            values = normalized(values, factor, weight_ptr, columns, offset, K, dtype)
        if GRAIN == "token":
            low, high = tl.min(values, axis=1), tl.max(values, axis=1)
            scale, zero = scale_and_zero(low, high, SYMMETRIC, POWER_OF_TWO, LIMIT, MAX_EXPONENT)
        store_tile(
            values, scale, zero, rows, row_mask, 0, codes_ptr, scale_ptr, zero_ptr,
            K, BLOCK_K, BLOCK_ROWS, GROUP, ELEMENT, SYMMETRIC, POWER_OF_TWO, LIMIT, MAX_EXPONENT,
        )  # fmt: skip
    else:
        if NORM:
            squares = tl.zeros([BLOCK_ROWS, BLOCK_K], dtype=tl.float32)
            for start in range(0, K, BLOCK_K):
                inside = row_mask[:, None] & (start + columns < K)
                values = source_values(x_rows, residual_rows, start + columns, inside, K, SOURCE)
                squares += values * values
                if SOURCE == "add_norm":
                    target = new_residual_ptr + rows[:, None] * K + start + columns
                    tl.store(target, values.to(residual_ptr.dtype.element_ty), mask=inside)
            factor = 1.0 / tl.sqrt(tl.sum(squares, axis=1) / K + eps)
        if GRAIN == "token":
            lows = tl.zeros([BLOCK_ROWS, BLOCK_K], dtype=tl.float32)
            highs = tl.zeros([BLOCK_ROWS, BLOCK_K], dtype=tl.float32)
            for start in range(0, K, BLOCK_K):
                inside = row_mask[:, None] & (start + columns < K)
                values = source_values(x_rows, residual_rows, start + columns, inside, K, SOURCE)
                if NORM:
                    values = normalized(values, factor, weight_ptr, start + columns, offset, K, dtype)
                lows, highs = tl.minimum(lows, values), tl.maximum(highs, values)
            low, high = tl.min(lows, axis=1), tl.max(highs, axis=1)
            scale, zero = scale_and_zero(low, high, SYMMETRIC, POWER_OF_TWO, LIMIT, MAX_EXPONENT)
        for start in range(0, K, BLOCK_K):
            inside = row_mask[:, None] & (start + columns < K)
            values = source_values(x_rows, residual_rows, start + columns, inside, K, SOURCE)
            if NORM:
                values = normalized(values, factor, weight_ptr, start + columns, offset, K, dtype)
            store_tile(
                values, scale, zero, rows, row_mask, start, codes_ptr, scale_ptr, zero_ptr,
                K, BLOCK_K, BLOCK_ROWS, GROUP, ELEMENT, SYMMETRIC, POWER_OF_TWO, LIMIT, MAX_EXPONENT,
            )  # fmt: skip
    if GRAIN == "token":
        tl.store(scale_ptr + rows, scale, mask=row_mask)
        if not SYMMETRIC:
            tl.store(zero_ptr + rows, zero.to(tl.int32), mask=row_mask)
    elif GRAIN == "tensor":
        first = rows == 0
        tl.store(scale_ptr + rows, scale, mask=first)
        if not SYMMETRIC:
            tl.store(zero_ptr + rows, zero.to(tl.int32), mask=first)


@triton.jit
def range_kernel(
    x_ptr: tl.tensor, range_ptr: tl.tensor, size: tl.tensor, blocks_per_program: tl.tensor, BLOCK: tl.constexpr
) -> None:
    """Smallest and largest value (0 included) of each program's part of x."""
    low = tl.zeros([BLOCK], dtype=tl.float32)
    high = tl.zeros([BLOCK], dtype=tl.float32)
    first = tl.program_id(0).to(tl.int64) * blocks_per_program * BLOCK
    for block in range(0, blocks_per_program):
        index = first + block * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + index, mask=index < size, other=0.0).to(tl.float32)
        low, high = tl.minimum(low, x), tl.maximum(high, x)
    tl.store(range_ptr + 2 * tl.program_id(0), tl.min(low, axis=0))
    tl.store(range_ptr + 2 * tl.program_id(0) + 1, tl.max(high, axis=0))


def constants(columns: int, wanted: InputFormat, source: str, arch: str) -> tuple[dict[str, Any], int]:
    """(compile-time arguments, warps) for rows of ``columns`` values."""
    how = wanted.how
    group = max(how.group_size, 0)
    grain = "group" if group else ("token" if how.group_size == -1 else "tensor") if how.dynamic else "static"
    launch = row_launch(arch, columns)
    # A row that takes several passes anyway: half a tile, which leaves registers for scales and for norms' sums.
    longest = MAX_TILE // 2 if columns > MAX_TILE and (group or source.endswith("norm")) else MAX_TILE
    block_k = max(min(triton.next_power_of_2(columns), longest), group)
    values = {
        "K": columns,
        "BLOCK_K": block_k,
        "BLOCK_ROWS": max(1, launch.elements // block_k),
        "RANGES": MAX_RANGES,
        "SOURCE": source,
        "GRAIN": grain,
        "GROUP": group,
        **element_constants(how, wanted.codes_dtype),
        "SYMMETRIC": how.symmetric or not (how.dynamic or wanted.zero is not None),
    }
    return values, launch.num_warps


def quantize_activation(
    x: Tensor,
    how: Activation,
    scale: Tensor | None = None,
    zero: Tensor | None = None,
    *,
    codes_dtype: torch.dtype | None = None,
) -> QuantizedInput:
    """x [T,K] quantized as ``reference.quantize_activation`` says; any group size."""
    default = torch.int8 if how.element is Element.INT8 else torch.float8_e4m3fn
    wanted = InputFormat(how, codes_dtype or default, scale, zero)
    size = how.group_size
    if size > 0 and size != triton.next_power_of_2(size):
        return _odd_groups(x, wanted)
    return _launch(x, x.shape[1], wanted, "plain")


def rms_norm_quantized(
    x: Tensor, weight: Tensor, eps: float, wanted: InputFormat, offset: float = 0.0
) -> QuantizedInput:
    """RMSNorm of x [T,K] over K, quantized."""
    return _launch(x, x.shape[1], wanted, "norm", weight, eps, offset)


def add_rms_norm_quantized(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, wanted: InputFormat, offset: float = 0.0
) -> tuple[QuantizedInput, Tensor]:
    """(RMSNorm of ``x + residual`` [T,K], quantized; the sum)."""
    residual = residual.contiguous()
    total = torch.empty_like(residual)
    quantized = _launch(x, x.shape[1], wanted, "add_norm", weight, eps, offset, residual, total)
    return quantized, total


def silu_and_mul_quantized(x: Tensor, wanted: InputFormat) -> QuantizedInput:
    """x [T,2I] -> silu(gate) * up [T,I], quantized."""
    return _launch(x, x.shape[1] // 2, wanted, "silu")


def gelu_and_mul_quantized(x: Tensor, wanted: InputFormat, approximate: str = "none") -> QuantizedInput:
    """x [T,2I] -> gelu(gate) * up [T,I], quantized; ``approximate`` is ``none`` (erf) or ``tanh``."""
    assert approximate in ("none", "tanh"), f"approximate is {approximate!r}, not none or tanh"
    return _launch(x, x.shape[1] // 2, wanted, "gelu" if approximate == "none" else "gelu_tanh")


def _odd_groups(x: Tensor, wanted: InputFormat) -> QuantizedInput:
    """Groups that no tile holds a whole number of: each is a row of its own."""
    (num_rows, columns), how = x.shape, wanted.how
    padded = F.pad(x, (0, -columns % how.group_size))
    one_row = Activation(how.element, -1, symmetric=how.symmetric, power_of_two=how.power_of_two)
    rows = padded.reshape(-1, how.group_size)
    quantized = _launch(rows, how.group_size, InputFormat(one_row, wanted.codes_dtype), "plain")
    codes = quantized.codes.view(padded.shape)[:, :columns].contiguous()
    shape = (num_rows, padded.shape[1] // how.group_size)
    zero = None if quantized.zero is None else quantized.zero.view(shape)
    return QuantizedInput(codes, quantized.scale.view(shape), zero, how, x.dtype)


def _launch(
    x: Tensor,
    columns: int,
    wanted: InputFormat,
    source: str,
    weight: Tensor | None = None,
    eps: float = 0.0,
    offset: float = 0.0,
    residual: Tensor | None = None,
    total: Tensor | None = None,
) -> QuantizedInput:
    if x.stride(1) != 1:
        x = x.contiguous()
    num_rows = x.shape[0]
    values, num_warps = constants(columns, wanted, source, device_arch(x.device))
    result = _empty(x, columns, wanted, values["GROUP"])
    ranges, num_ranges = _ranges(x, wanted) if values["GRAIN"] == "tensor" else (result.scale, 0)
    if num_rows == 0:
        return result
    quantize_rows_kernel[(triton.cdiv(num_rows, values["BLOCK_ROWS"]),)](
        x,
        x if residual is None else residual,
        x if weight is None else weight,
        x if total is None else total,
        result.codes,
        result.scale,
        result.scale if result.zero is None else result.zero,
        result.scale if wanted.scale is None else wanted.scale,
        result.scale if wanted.zero is None else wanted.zero,
        ranges,
        num_rows,
        num_ranges,
        x.stride(0),
        eps,
        offset,
        **values,
        num_warps=num_warps,
    )
    return result


def _empty(x: Tensor, columns: int, wanted: InputFormat, group: int) -> QuantizedInput:
    """The result before it is computed; static scales are the given ones."""
    how, num_rows = wanted.how, x.shape[0]
    codes = torch.empty((num_rows, columns), dtype=wanted.codes_dtype, device=x.device)
    if not how.dynamic:
        assert wanted.scale is not None, f"{how} needs a stored scale"
        zero = None if how.symmetric or wanted.zero is None else wanted.zero.reshape(1, 1).to(torch.int32)
        return QuantizedInput(codes, wanted.scale.reshape(1, 1), zero, how, x.dtype)
    shape = (1, 1) if how.group_size == 0 else (num_rows, triton.cdiv(columns, group) if group else 1)
    scale = torch.empty(shape, dtype=torch.float32, device=x.device)
    return QuantizedInput(
        codes, scale, None if how.symmetric else torch.empty_like(scale, dtype=torch.int32), how, x.dtype
    )


def _ranges(x: Tensor, wanted: InputFormat) -> tuple[Tensor, int]:
    """Partial ranges of x, float32 [programs,2], and how many."""
    x = x.contiguous()
    blocks = max(1, triton.cdiv(x.numel(), RANGE_BLOCK))
    per_program = triton.cdiv(blocks, MAX_RANGES)
    programs = triton.cdiv(blocks, per_program)
    ranges = torch.empty((programs, 2), dtype=torch.float32, device=x.device)
    range_kernel[(programs,)](x, ranges, x.numel(), per_program, BLOCK=RANGE_BLOCK, num_warps=8)
    return ranges, programs
