"""LoRA for many adapters in one batch: rows that share an adapter share a tile, and every row's sums are its own.

    shrink  x [T,K], a [L,R,K] -> y [T,R] float32       reads R K e bytes once per 16 rows of an adapter, x R/tile times
    expand  out [T,N] += scale * (y @ b.T), b [L,N,R]   reads N R e bytes once per 16 rows of an adapter, out once

2 T R K and 2 T R N operations. The order of the rows comes from ``moe_align``, on the device. K is cut into parts
of ``SPLIT_K`` that are added in order: by programs of their own and a second launch where few programs would read the
adapters (decoding), else within the program. Both give the same bits, so a row's result does not depend on its batch.
``y`` is rounded to b's dtype for the matrix instructions.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .expert_blocks import Blocks, blocks_of, load_block
from .launch_lora import BLOCK_M, SPLIT_K, LoraLaunch, lora_row
from .packed_linear import REDUCE_BLOCK, add_splits_kernel
from .runtime import device_arch, num_cores


@triton.jit
def _part(
    x_rows: tl.tensor,
    a_rows: tl.tensor,
    x_mask: tl.tensor,
    a_mask: tl.tensor,
    first: tl.tensor,
    K: tl.tensor,
    BLOCK_M: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
) -> tl.tensor:
    total = tl.zeros([BLOCK_M, BLOCK_RANK], dtype=tl.float32)
    for start in range(0, SPLIT_K, BLOCK_K):
        features = first + start + tl.arange(0, BLOCK_K)
        inside = (features < K)[None, :]
        x = tl.load(x_rows + features[None, :], mask=x_mask & inside, other=0.0)
        a = tl.load(a_rows + features[None, :], mask=a_mask & inside, other=0.0)
        total = tl.dot(x, tl.trans(a), total, input_precision="ieee")
    return total


@triton.jit
def lora_shrink_kernel(
    x_ptr: tl.tensor,
    a_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    order_ptr: tl.tensor,
    blocks_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_blocks: tl.tensor,
    num_adapters: tl.tensor,
    num_rows: tl.tensor,
    rank: tl.tensor,
    K: tl.tensor,
    x_row_stride: tl.tensor,
    ALIGNED: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
) -> None:
    # out [T,R], or with SPLIT [parts,T,R]
    adapter, has_adapter, rows, mask = load_block(
        ids_ptr, order_ptr, blocks_ptr, num_blocks, num_adapters, ALIGNED, BLOCK_M
    )
    mask = mask & (tl.arange(0, BLOCK_M) < tl.where(has_adapter, BLOCK_M, 0))
    ranks = tl.program_id(1) * BLOCK_RANK + tl.arange(0, BLOCK_RANK)
    x_rows = x_ptr + (rows * x_row_stride)[:, None]
    a_rows = a_ptr + (adapter * rank * K + ranks.to(tl.int64) * K)[:, None]
    a_mask = (ranks < tl.where(has_adapter, rank, 0))[:, None]
    if SPLIT:
        part = tl.program_id(2)
        out_ptr += part.to(tl.int64) * num_rows * rank
        total = _part(x_rows, a_rows, mask[:, None], a_mask, part * SPLIT_K, K, BLOCK_M, BLOCK_RANK, BLOCK_K, SPLIT_K)
    else:
        total = tl.zeros([BLOCK_M, BLOCK_RANK], dtype=tl.float32)
        for first in range(0, K, SPLIT_K):
            total += _part(x_rows, a_rows, mask[:, None], a_mask, first, K, BLOCK_M, BLOCK_RANK, BLOCK_K, SPLIT_K)
    places = out_ptr + (rows * rank)[:, None] + ranks[None, :]
    tl.store(places, total, mask=mask[:, None] & (ranks < rank)[None, :])


@triton.jit
def lora_expand_kernel(
    y_ptr: tl.tensor,
    b_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    order_ptr: tl.tensor,
    blocks_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_blocks: tl.tensor,
    num_adapters: tl.tensor,
    rank: tl.tensor,
    N: tl.tensor,
    out_row_stride: tl.tensor,
    ALIGNED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    adapter, has_adapter, rows, mask = load_block(
        ids_ptr, order_ptr, blocks_ptr, num_blocks, num_adapters, ALIGNED, BLOCK_M
    )
    mask = mask & (tl.arange(0, BLOCK_M) < tl.where(has_adapter, BLOCK_M, 0))
    outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    b_rows = b_ptr + (adapter * N * rank + outputs.to(tl.int64) * rank)[:, None]
    b_mask = (outputs < tl.where(has_adapter, N, 0))[:, None]
    total = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for first in range(0, rank, BLOCK_RANK):
        ranks = first + tl.arange(0, BLOCK_RANK)
        inside = (ranks < rank)[None, :]
        y = tl.load(y_ptr + (rows * rank)[:, None] + ranks[None, :], mask=mask[:, None] & inside, other=0.0)
        b = tl.load(b_rows + ranks[None, :], mask=b_mask & inside, other=0.0)
        total = tl.dot(y.to(b.dtype), tl.trans(b), total, input_precision="ieee")
    places = out_ptr + (rows * out_row_stride)[:, None] + outputs[None, :]
    out_mask = mask[:, None] & (outputs < N)[None, :]
    before = tl.load(places, mask=out_mask, other=0.0).to(tl.float32)
    scale = tl.load(scales_ptr + adapter)
    tl.store(places, (before + total * scale).to(out_ptr.dtype.element_ty), mask=out_mask)


def shrink_constants(launch: LoraLaunch) -> dict[str, Any]:
    """The compile-time arguments of the shrinking product, ``ALIGNED`` and ``SPLIT`` apart."""
    return {"BLOCK_M": BLOCK_M, "BLOCK_RANK": launch.block_rank, "BLOCK_K": launch.block_k, "SPLIT_K": SPLIT_K}


def expand_constants(launch: LoraLaunch) -> dict[str, Any]:
    """The compile-time arguments of the expanding product, ``ALIGNED`` apart."""
    return {"BLOCK_M": BLOCK_M, "BLOCK_RANK": launch.block_rank, "BLOCK_N": launch.block_n}


def lora_shrink(x: Tensor, a: Tensor, adapter_ids: Tensor) -> Tensor:
    """``reference.lora_shrink``: x [T,K], contiguous a [L,R,K], adapter_ids int32 [T] -> float32 [T,R]."""
    num_rows, num_adapters, rank = x.shape[0], a.shape[0], a.shape[1]
    out = torch.zeros((num_rows, rank), dtype=torch.float32, device=x.device)
    if num_rows == 0 or num_adapters == 0:
        return out
    x = x if x.stride(1) == 1 else x.contiguous()
    launch = lora_row(device_arch(x.device), rank, x.element_size())
    blocks = blocks_of(adapter_ids[:, None], num_adapters, BLOCK_M)
    grid = (blocks.num_blocks, triton.cdiv(rank, launch.block_rank))
    parts = triton.cdiv(x.shape[1], SPLIT_K)
    split = parts > 1 and grid[0] * grid[1] < num_cores(x.device)
    target = torch.zeros((parts, num_rows, rank), dtype=torch.float32, device=x.device) if split else out
    lora_shrink_kernel[(grid[0], grid[1], parts if split else 1)](
        x,
        a,
        *_tables(blocks),
        target,
        blocks.num_blocks,
        num_adapters,
        num_rows,
        rank,
        x.shape[1],
        x.stride(0),
        ALIGNED=blocks.aligned,
        SPLIT=split,
        **shrink_constants(launch),
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )
    if split:
        add_grid = (triton.cdiv(out.numel(), REDUCE_BLOCK),)
        add_splits_kernel[add_grid](
            target, target, out, out.numel(), rank, parts, HAS_BIAS=False, BLOCK=REDUCE_BLOCK, num_warps=4
        )
    return out


def lora_expand(y: Tensor, b: Tensor, adapter_ids: Tensor, out: Tensor, scales: Tensor) -> None:
    """``reference.lora_expand``: contiguous y float32 [T,R], b [L,N,R]; out [T,N] is changed in place."""
    num_adapters, num_outputs, rank = b.shape
    if out.shape[0] == 0 or num_adapters == 0:
        return
    assert out.stride(1) == 1, "lora_expand needs rows whose columns lie side by side"
    launch = lora_row(device_arch(out.device), rank, b.element_size())
    blocks = blocks_of(adapter_ids[:, None], num_adapters, BLOCK_M)
    lora_expand_kernel[(blocks.num_blocks, triton.cdiv(num_outputs, launch.block_n))](
        y,
        b,
        scales,
        *_tables(blocks),
        out,
        blocks.num_blocks,
        num_adapters,
        rank,
        num_outputs,
        out.stride(0),
        ALIGNED=blocks.aligned,
        **expand_constants(launch),
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )


def _tables(blocks: Blocks) -> tuple[Tensor, Tensor, Tensor]:
    return blocks.ids, blocks.order, blocks.table
