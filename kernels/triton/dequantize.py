"""Unpack a whole weight to 16 or 32-bit floats, for products with so many rows that a dense library product wins.

Cost: reads N K bits/8 bytes of codes, writes N K elements, 4 N K operations; the product reads them again. At most
``MAX_CHUNK_BYTES`` of dequantized weight exist at a time.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .packed_weight import PreparedWeight, grouping
from .unpack import load_codes, scaled_weight

BLOCK_K = 128
MAX_CHUNK_BYTES = 128 << 20


@triton.jit
def dequantize_kernel(
    stream_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    zeros_ptr: tl.tensor,
    out_ptr: tl.tensor,
    first_output: tl.tensor,
    num_outputs: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    group_size: tl.tensor,
    stream_row_stride: tl.tensor,
    BITS: tl.constexpr,
    PACK: tl.constexpr,
    GROUPING: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    rows = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    outputs = first_output + rows
    row_mask = rows < num_outputs
    start = tl.program_id(0) * BLOCK_K
    columns = start + tl.arange(0, BLOCK_K)
    codes = load_codes(stream_ptr, outputs, row_mask, start // PACK, stream_row_stride, BITS, PACK, BLOCK_N, BLOCK_K)
    weight = scaled_weight(
        codes, scales_ptr, zeros_ptr, outputs, row_mask, start, N, K, group_size,
        BITS, PACK, GROUPING, HAS_ZEROS, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    mask = row_mask[:, None] & (columns < K)[None, :]
    out = out_ptr + rows.to(tl.int64)[:, None] * K + columns[None, :]
    tl.store(out, weight.to(out_ptr.dtype.element_ty), mask=mask)


def constants(bits: int, pack: int, group_size: int) -> dict[str, Any]:
    """The compile-time arguments."""
    by = grouping(group_size, block_k=1 << 30, pack=pack)
    return {"BITS": bits, "PACK": pack, "GROUPING": by, "BLOCK_N": 16 if by == "code" else 32, "BLOCK_K": BLOCK_K}


def dequantize(prepared: PreparedWeight, dtype: torch.dtype, first: int, count: int) -> Tensor:
    """Output rows ``first`` to ``first + count`` as [count, K] of ``dtype``, columns in packed order."""
    outputs, features = prepared.shape
    out = torch.empty((count, features), dtype=dtype, device=prepared.stream.device)
    values = constants(prepared.bits, prepared.pack, prepared.group_size)
    dequantize_kernel[(triton.cdiv(features, BLOCK_K), triton.cdiv(count, values["BLOCK_N"]))](
        prepared.stream,
        prepared.scales,
        prepared.stream if prepared.zeros is None else prepared.zeros,
        out,
        first,
        count,
        outputs,
        features,
        prepared.group_size,
        prepared.stream.stride(0),
        HAS_ZEROS=prepared.zeros is not None,
        **values,
        num_warps=4,
    )
    return out


def dequantized_linear(x: Tensor, prepared: PreparedWeight, bias: Tensor | None) -> Tensor:
    """x [T,K] times the weight, dequantized a chunk of output features at a time -> [T,N]."""
    outputs, features = prepared.shape
    if prepared.perm is not None:
        x = x[:, prepared.perm]
    chunk = max(1, MAX_CHUNK_BYTES // (features * x.element_size()))
    parts = []
    for first in range(0, outputs, chunk):
        count = min(chunk, outputs - first)
        part_bias = None if bias is None else bias[first : first + count]
        parts.append(torch.nn.functional.linear(x, dequantize(prepared, x.dtype, first, count), part_bias))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
