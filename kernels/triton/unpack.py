"""Codes of 2, 3, 4 and 8 bits out of the canonical bit stream, as a tile of a Triton kernel.

A unit is the smallest run of codes that starts on a boundary a load can address: one int32 word (16, 8 or 4 codes), or
for 3 bits three bytes (8 codes). Each unit is loaded once, as neighbouring units of one output row, and spread inside
the lane.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

SUPPORTED_BITS = (2, 3, 4, 8)


def codes_per_unit(bits: int) -> int:
    """Codes in one unit."""
    return 8 if bits == 3 else 32 // bits


def as_units(qweight: Tensor, bits: int) -> Tensor:
    """The stream [N, words] as the kernels address it: int32 words, or bytes for 3 bits."""
    return qweight.view(torch.uint8) if bits == 3 else qweight


@triton.jit
def load_codes(
    stream_ptr: tl.tensor,
    rows: tl.tensor,
    row_mask: tl.tensor,
    first_unit: tl.tensor,
    row_stride: tl.tensor,
    BITS: tl.constexpr,
    PACK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> tl.tensor:
    """int32 codes [BLOCK_N, BLOCK_K] of output rows ``rows`` from unit ``first_unit`` on; 0 beyond a row."""
    units = first_unit + tl.arange(0, BLOCK_K // PACK)[None, :]
    row_start = stream_ptr + (rows.to(tl.int64) * row_stride)[:, None]
    if BITS == 3:
        first = units * 3
        words = tl.load(row_start + first, mask=row_mask[:, None] & (first < row_stride), other=0).to(tl.int32)
        second = tl.load(row_start + first + 1, mask=row_mask[:, None] & (first + 1 < row_stride), other=0).to(tl.int32)
        third = tl.load(row_start + first + 2, mask=row_mask[:, None] & (first + 2 < row_stride), other=0).to(tl.int32)
        words = words | (second << 8) | (third << 16)
    else:
        words = tl.load(row_start + units, mask=row_mask[:, None] & (units < row_stride), other=0)
    shifts = tl.arange(0, PACK) * BITS
    codes = (words[:, :, None] >> shifts[None, None, :]) & ((1 << BITS) - 1)
    return tl.reshape(codes, [BLOCK_N, BLOCK_K])


@triton.jit
def spread(values: tl.tensor, PACK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr) -> tl.tensor:
    """One value per unit [BLOCK_N, BLOCK_K // PACK] repeated for each of its codes [BLOCK_N, BLOCK_K]."""
    repeated = tl.broadcast_to(values[:, :, None], [BLOCK_N, BLOCK_K // PACK, PACK])
    return tl.reshape(repeated, [BLOCK_N, BLOCK_K])


@triton.jit
def to_float(codes: tl.tensor) -> tl.tensor:
    """Codes below 2**23 as float32 through exponent bits: full-rate instructions instead of a conversion."""
    return (codes | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0


@triton.jit
def are_offsets(zeros_ptr: tl.tensor) -> tl.constexpr:
    """Whether floats are added to the scaled codes, instead of integers being taken off them before."""
    return zeros_ptr.dtype.element_ty != tl.uint8


@triton.jit
def scaled_weight(
    codes: tl.tensor,
    scales_ptr: tl.tensor,
    zeros_ptr: tl.tensor,
    outputs: tl.tensor,
    output_mask: tl.tensor,
    start: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    group_size: tl.tensor,
    BITS: tl.constexpr,
    PACK: tl.constexpr,
    GROUPING: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> tl.tensor:
    """float32 ``(code - zero) * scale``, or ``code * scale + offset``, [BLOCK_N, BLOCK_K]; groups per unit or code."""
    if GROUPING == "code":
        columns = start + tl.arange(0, BLOCK_K)
    else:
        columns = start + tl.arange(0, BLOCK_K // PACK) * PACK
    groups = (columns // group_size)[None, :] * N + outputs[:, None]
    mask = output_mask[:, None] & (columns < K)[None, :]
    scales = tl.load(scales_ptr + groups, mask=mask, other=0.0).to(tl.float32)
    if not HAS_ZEROS:
        zeros = tl.full(scales.shape, 1 << (BITS - 1), dtype=tl.float32)
    elif are_offsets(zeros_ptr):
        zeros = tl.load(zeros_ptr + groups, mask=mask, other=0).to(tl.float32)
    else:
        zeros = to_float(tl.load(zeros_ptr + groups, mask=mask, other=0).to(tl.int32))
    if GROUPING == "unit":
        scales = spread(scales, PACK, BLOCK_N, BLOCK_K)
        zeros = spread(zeros, PACK, BLOCK_N, BLOCK_K)
    if HAS_ZEROS and are_offsets(zeros_ptr):
        return to_float(codes) * scales + zeros
    return (to_float(codes) - zeros) * scales
