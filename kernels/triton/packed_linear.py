"""Matrix product with 2, 3, 4 or 8-bit weights that are unpacked in registers: y = x @ W.T (+ bias).

    x [T,K] 16 or 32-bit float   stream, scales [G,N], zeros [G,N]: see packed_weight.py   y [T,N] in x's dtype

Cost: reads N K bits/8 of codes and N G (scale + zero) bytes once per ``block_m`` rows of x, and T K elements of x once
per ``block_n`` outputs; 2 T N K operations and about 4 per code for unpacking, once per ``block_m`` rows. With few
rows the weight's bytes are everything, and K is split so that enough programs read it; the parts are added in a fixed
order.

Where a tile of K lies within one group, codes minus zero (exact in 16 bits) are multiplied and the scale is applied to
the product; an offset instead of a zero multiplies the sum of the inputs. Otherwise each weight is scaled in float32
and rounded to x's dtype, as dequantizing does.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .dequantize import dequantized_linear
from .launch_table import LinearLaunch, crossover_rows, linear_launch
from .packed_weight import PreparedWeight, grouping
from .runtime import device_arch, num_cores
from .unpack import are_offsets, load_codes, scaled_weight, to_float

MAX_SPLITS = 16
REDUCE_BLOCK = 1024
GATHER_ROWS = 16


@triton.jit
def packed_product(
    x_rows: tl.tensor,
    row_mask: tl.tensor,
    stream_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    zeros_ptr: tl.tensor,
    perm_ptr: tl.tensor,
    outputs: tl.tensor,
    output_mask: tl.tensor,
    first_step: tl.tensor,
    last_step: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    group_size: tl.tensor,
    stream_row_stride: tl.tensor,
    BITS: tl.constexpr,
    PACK: tl.constexpr,
    GROUPING: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_PERM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> tl.tensor:
    """float32 [BLOCK_M, BLOCK_N]: rows at ``x_rows`` [BLOCK_M, 1] times a weight, over some steps of K."""
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for step in range(first_step, last_step):
        start = step * BLOCK_K
        columns = start + tl.arange(0, BLOCK_K)
        if HAS_PERM:
            features = tl.load(perm_ptr + columns, mask=columns < K, other=0)
        else:
            features = columns
        x = tl.load(x_rows + features[None, :], mask=row_mask[:, None] & (columns < K)[None, :], other=0.0)
        codes = load_codes(
            stream_ptr, outputs, output_mask, start // PACK, stream_row_stride, BITS, PACK, BLOCK_N, BLOCK_K
        )
        if GROUPING == "tile":
            group = (start // group_size) * N + outputs
            scales = tl.load(scales_ptr + group, mask=output_mask, other=0.0).to(tl.float32)
            weight = to_float(codes)
            if HAS_ZEROS:
                zeros = tl.load(zeros_ptr + group, mask=output_mask, other=0)
                if are_offsets(zeros_ptr):
                    acc += tl.sum(x.to(tl.float32), axis=1)[:, None] * zeros.to(tl.float32)[None, :]
                else:
                    weight -= to_float(zeros.to(tl.int32))[:, None]
            else:
                weight -= 1 << (BITS - 1)
            product = tl.dot(x, tl.trans(weight.to(x.dtype)), input_precision="ieee")
            acc += product * scales[None, :]
        else:
            weight = scaled_weight(
                codes, scales_ptr, zeros_ptr, outputs, output_mask, start, N, K, group_size,
                BITS, PACK, GROUPING, HAS_ZEROS, BLOCK_N, BLOCK_K,
            )  # fmt: skip
            acc = tl.dot(x, tl.trans(weight.to(x.dtype)), acc, input_precision="ieee")
    return acc


@triton.jit
def packed_linear_kernel(
    x_ptr: tl.tensor,
    stream_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    zeros_ptr: tl.tensor,
    perm_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_rows: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    group_size: tl.tensor,
    steps_per_split: tl.tensor,
    x_row_stride: tl.tensor,
    stream_row_stride: tl.tensor,
    BITS: tl.constexpr,
    PACK: tl.constexpr,
    GROUPING: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_PERM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    # Row tiles are the fastest axis: programs that run together share a tile of the weight.
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_mask = rows < num_rows
    output_mask = outputs < N
    x_rows = x_ptr + rows.to(tl.int64)[:, None] * x_row_stride
    first_step = 0
    last_step = tl.cdiv(K, BLOCK_K)
    if SPLIT:
        first_step = tl.program_id(2) * steps_per_split
        last_step = tl.minimum(first_step + steps_per_split, last_step)
    acc = packed_product(
        x_rows, row_mask, stream_ptr, scales_ptr, zeros_ptr, perm_ptr, outputs, output_mask, first_step, last_step,
        N, K, group_size, stream_row_stride, BITS, PACK, GROUPING, HAS_ZEROS, HAS_PERM, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    mask = row_mask[:, None] & output_mask[None, :]
    if SPLIT:
        out_rows = tl.program_id(2).to(tl.int64) * num_rows + rows
    else:
        out_rows = rows.to(tl.int64)
        if HAS_BIAS:
            acc += tl.load(bias_ptr + outputs, mask=output_mask, other=0.0).to(tl.float32)[None, :]
    tl.store(out_ptr + out_rows[:, None] * N + outputs[None, :], acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def add_splits_kernel(
    parts_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    size: tl.tensor,
    N: tl.tensor,
    splits: tl.tensor,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = index < size
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for split in range(0, splits):
        total += tl.load(parts_ptr + split * size + index, mask=mask, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias_ptr + index % N, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + index, total.to(out_ptr.dtype.element_ty), mask=mask)


def constants(launch: LinearLaunch, bits: int, pack: int, group_size: int) -> dict[str, Any]:
    """The compile-time arguments that follow from the scheme and the launch row."""
    return {
        "BITS": bits,
        "PACK": pack,
        "GROUPING": grouping(group_size, launch.block_k, pack),
        "BLOCK_M": launch.block_m,
        "BLOCK_N": launch.block_n,
        "BLOCK_K": launch.block_k,
    }


def packed_linear(x: Tensor, prepared: PreparedWeight, bias: Tensor | None = None) -> Tensor:
    """x [..., K] times the prepared weight [N,K], plus ``bias`` [N] -> [..., N]."""
    rows = x.reshape(-1, x.shape[-1])
    arch = device_arch(x.device)
    if rows.shape[0] >= crossover_rows(arch):
        out = dequantized_linear(rows, prepared, bias)
    else:
        launch = linear_launch(arch, rows.shape[0], x.element_size())
        out = launch_linear(
            rows, prepared, bias, launch, num_splits(rows.shape[0], prepared.shape, launch, num_cores(x.device))
        )
    return out.view(*x.shape[:-1], prepared.shape[0])


def num_splits(num_rows: int, shape: tuple[int, int], launch: LinearLaunch, cores: int) -> int:
    """Parts of K for a weight [N,K]: enough to fill the cores twice when there are few output tiles, each of at least
    four steps."""
    outputs, features = shape
    programs = triton.cdiv(num_rows, launch.block_m) * triton.cdiv(outputs, launch.block_n)
    if num_rows > launch.block_m or programs >= cores or programs == 0:
        return 1
    steps = triton.cdiv(features, launch.block_k)
    return max(1, min(triton.cdiv(2 * cores, programs), steps // 4, MAX_SPLITS))


def launch_linear(
    x: Tensor, prepared: PreparedWeight, bias: Tensor | None, launch: LinearLaunch, splits: int
) -> Tensor:
    """x [T,K] through the fused kernel, with the launch row and the number of parts of K given."""
    num_rows, features = x.shape
    outputs = prepared.shape[0]
    assert features == prepared.shape[1], f"x has {features} features, the weight {prepared.shape[1]}"
    out = torch.empty((num_rows, outputs), dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    perm = prepared.perm
    if perm is not None and num_rows > GATHER_ROWS:
        x, perm = x[:, perm], None
    elif x.stride(1) != 1:
        x = x.contiguous()
    values = constants(launch, prepared.bits, prepared.pack, prepared.group_size)
    steps_per_split = triton.cdiv(triton.cdiv(features, values["BLOCK_K"]), splits)
    target = out if splits == 1 else torch.empty((splits, *out.shape), dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(num_rows, launch.block_m), triton.cdiv(outputs, launch.block_n), splits)
    packed_linear_kernel[grid](
        x,
        prepared.stream,
        prepared.scales,
        prepared.stream if prepared.zeros is None else prepared.zeros,
        prepared.stream if perm is None else perm,
        x if bias is None else bias,
        target,
        num_rows,
        outputs,
        features,
        prepared.group_size,
        steps_per_split,
        x.stride(0),
        prepared.stream.stride(0),
        HAS_ZEROS=prepared.zeros is not None,
        HAS_PERM=perm is not None,
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


def add_splits(parts: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """The sum of float32 ``parts`` [S,T,N], plus ``bias`` [N], into ``out`` [T,N]."""
    size = out.numel()
    add_splits_kernel[(triton.cdiv(size, REDUCE_BLOCK),)](
        parts,
        parts if bias is None else bias,
        out,
        size,
        out.shape[1],
        parts.shape[0],
        HAS_BIAS=bias is not None,
        BLOCK=REDUCE_BLOCK,
        num_warps=4,
    )
