"""Products with experts of 16 or 32-bit weights: out[choice] = x[row of the choice] @ weight[expert].T.

    x [R,K]   weight [E,N,K]   out [T*k,N], all of one dtype

Cost: reads N K elements of each expert that got rows, once per ``block_m`` of them, and each block's rows of x once per
``block_n`` outputs; 2 T k N K operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...quant.canonical import CanonicalWeight, DenseWeight
from .expert_blocks import StreamedStack, blocks_of, expected_rows, input_rows, load_block
from .launch_experts import dense_launch
from .launch_table import LinearLaunch
from .runtime import device_arch


@dataclass(frozen=True, slots=True, eq=False)
class DenseExperts:
    """``weight`` [E,N,K] with contiguous rows."""

    weight: Tensor


@triton.jit(do_not_specialize=["num_blocks"])
def dense_experts_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    order_ptr: tl.tensor,
    blocks_ptr: tl.tensor,
    num_blocks: tl.tensor,
    num_experts: tl.tensor,
    choices_per_row: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    x_row_stride: tl.tensor,
    weight_expert_stride: tl.tensor,
    weight_row_stride: tl.tensor,
    ALIGNED: tl.constexpr,
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
    weight_rows = weight_ptr + expert * weight_expert_stride + outputs.to(tl.int64)[:, None] * weight_row_stride
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in range(0, tl.where(has_expert, K, 0), BLOCK_K):
        columns = (start + tl.arange(0, BLOCK_K))[None, :]
        x = tl.load(x_rows + columns, mask=row_mask[:, None] & (columns < K), other=0.0)
        weight = tl.load(weight_rows + columns, mask=output_mask[:, None] & (columns < K), other=0.0)
        acc = tl.dot(x, tl.trans(weight), acc, input_precision="ieee")
    out = out_ptr + choices[:, None] * N + outputs[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=row_mask[:, None] & output_mask[None, :])


def prepare(weights: Sequence[CanonicalWeight], dtype: torch.dtype) -> DenseExperts:
    """The experts' matrices as one, in the activations' ``dtype``."""
    matrices = StreamedStack(len(weights))
    for weight in weights:
        assert isinstance(weight, DenseWeight), "dense experts take dense weights; can_run refuses others"
        matrices.put(weight.weight.to(dtype))
    return DenseExperts(matrices.finish())


def constants(launch: LinearLaunch, *, aligned: bool) -> dict[str, Any]:
    """The compile-time arguments."""
    return {"ALIGNED": aligned, "BLOCK_M": launch.block_m, "BLOCK_N": launch.block_n, "BLOCK_K": launch.block_k}


def dense_experts(x: Tensor, experts: DenseExperts, expert_ids: Tensor) -> Tensor:
    """x [T,K] or [T,k,K] -> [T,k,N]."""
    count = expected_rows(expert_ids, experts.weight.shape[0])
    return launch_dense(x, experts, expert_ids, dense_launch(device_arch(x.device), count, x.element_size()))


def launch_dense(x: Tensor, experts: DenseExperts, expert_ids: Tensor, launch: LinearLaunch) -> Tensor:
    """[T,k,N] with the launch row given."""
    num_experts, width, features = experts.weight.shape
    assert x.shape[-1] == features, f"x has {x.shape[-1]} features, the experts {features}"
    out = torch.empty((*expert_ids.shape, width), dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    blocks = blocks_of(expert_ids, num_experts, launch.block_m)
    inputs, choices_per_row = input_rows(x, expert_ids)
    dense_experts_kernel[(blocks.num_blocks, triton.cdiv(width, launch.block_n))](
        inputs,
        experts.weight,
        out,
        *blocks.arguments(),
        choices_per_row,
        width,
        features,
        inputs.stride(0),
        experts.weight.stride(0),
        experts.weight.stride(1),
        **constants(launch, aligned=blocks.aligned),
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        **launch.options,
    )
    return out
