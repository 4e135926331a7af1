"""Products with experts of 2, 3, 4 or 8-bit weights that are unpacked in registers; the arithmetic of
``packed_linear.py``, expert by expert.

    x [R,K] 16 or 32-bit float   stream [E,N,units], scales [E,G,N], zeros [E,G,N], perm [E,K]   out [T*k,N]

Cost: reads N K bits/8 bytes of codes and the scales of each expert that got rows, once per ``block_m`` of them, and
each block's rows of x once per ``block_n`` outputs; 2 T k N K operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...quant.canonical import CanonicalWeight
from . import packed_weight
from .expert_blocks import StreamedStack, blocks_of, expected_rows, input_rows, load_block, stack, stack_all
from .launch_table import LinearLaunch, linear_launch
from .packed_linear import constants, packed_product
from .runtime import device_arch
from .unpack import codes_per_unit


@dataclass(frozen=True, slots=True, eq=False)
class PackedExperts:
    """``bits``, ``shape`` (N, K) and ``group_size`` of every expert; the tensors are ``PreparedWeight``'s, stacked."""

    bits: int
    shape: tuple[int, int]
    group_size: int
    stream: Tensor
    scales: Tensor
    zeros: Tensor | None
    perm: Tensor | None


@triton.jit(do_not_specialize=["num_blocks"])
def packed_experts_kernel(
    x_ptr: tl.tensor,
    stream_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    zeros_ptr: tl.tensor,
    perm_ptr: tl.tensor,
    out_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    order_ptr: tl.tensor,
    blocks_ptr: tl.tensor,
    num_blocks: tl.tensor,
    num_experts: tl.tensor,
    choices_per_row: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    group_size: tl.tensor,
    num_groups: tl.tensor,
    x_row_stride: tl.tensor,
    stream_expert_stride: tl.tensor,
    stream_row_stride: tl.tensor,
    ALIGNED: tl.constexpr,
    BITS: tl.constexpr,
    PACK: tl.constexpr,
    GROUPING: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_PERM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    # Blocks are the fastest axis: programs that run together share a tile of an expert's weight.
    expert, has_expert, choices, row_mask = load_block(
        ids_ptr, order_ptr, blocks_ptr, num_blocks, num_experts, ALIGNED, BLOCK_M
    )
    outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    output_mask = outputs < N
    x_rows = x_ptr + (choices // choices_per_row)[:, None] * x_row_stride
    grid = expert * num_groups * N
    last_step = tl.where(has_expert, tl.cdiv(K, BLOCK_K), 0)
    acc = packed_product(
        x_rows, row_mask, stream_ptr + expert * stream_expert_stride, scales_ptr + grid, zeros_ptr + grid,
        perm_ptr + expert * K, outputs, output_mask, 0, last_step, N, K, group_size, stream_row_stride,
        BITS, PACK, GROUPING, HAS_ZEROS, HAS_PERM, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    out = out_ptr + choices[:, None] * N + outputs[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=row_mask[:, None] & output_mask[None, :])


def prepare(weights: Sequence[CanonicalWeight], dtype: torch.dtype) -> PackedExperts:
    """The kernel's view of the experts' packed weights."""
    parts, streams = [], StreamedStack(len(weights))
    for weight in weights:
        part = packed_weight.prepare(weight, dtype)
        streams.put(part.stream)
        parts.append(replace(part, stream=part.stream.new_empty(0)))
    return PackedExperts(
        bits=parts[0].bits,
        shape=parts[0].shape,
        group_size=parts[0].group_size,
        stream=streams.finish(),
        scales=stack([part.scales for part in parts]),
        zeros=stack_all([part.zeros for part in parts]),
        perm=stack_all([part.perm for part in parts]),
    )


def packed_experts(x: Tensor, experts: PackedExperts, expert_ids: Tensor) -> Tensor:
    """x [T,K] or [T,k,K] -> [T,k,N]."""
    count = expected_rows(expert_ids, experts.stream.shape[0])
    return launch_packed(x, experts, expert_ids, linear_launch(device_arch(x.device), count, x.element_size()))


def launch_packed(x: Tensor, experts: PackedExperts, expert_ids: Tensor, launch: LinearLaunch) -> Tensor:
    """[T,k,N] with the launch row given."""
    width, features = experts.shape
    assert x.shape[-1] == features, f"x has {x.shape[-1]} features, the experts {features}"
    out = torch.empty((*expert_ids.shape, width), dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    blocks = blocks_of(expert_ids, experts.stream.shape[0], launch.block_m)
    inputs, choices_per_row = input_rows(x, expert_ids)
    packed_experts_kernel[(blocks.num_blocks, triton.cdiv(width, launch.block_n))](
        inputs,
        experts.stream,
        experts.scales,
        experts.stream if experts.zeros is None else experts.zeros,
        experts.stream if experts.perm is None else experts.perm,
        out,
        *blocks.arguments(),
        choices_per_row,
        width,
        features,
        experts.group_size,
        experts.scales.shape[1],
        inputs.stride(0),
        experts.stream.stride(0),
        experts.stream.stride(1),
        **packed_constants(launch, experts, aligned=blocks.aligned),
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        **launch.options,
    )
    return out


def packed_constants(launch: LinearLaunch, experts: PackedExperts, *, aligned: bool) -> dict[str, Any]:
    """The compile-time arguments."""
    flags = {"ALIGNED": aligned, "HAS_ZEROS": experts.zeros is not None, "HAS_PERM": experts.perm is not None}
    return {**constants(launch, experts.bits, codes_per_unit(experts.bits), experts.group_size), **flags}
