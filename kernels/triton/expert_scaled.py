"""Products with experts of 8-bit weights and their scales; the arithmetic of ``scaled_linear.py``, expert by expert.

    x [R,K] codes or floats   codes [E,N,K]   scales, zeros [E,GK,GN]   sums [E,.,N]   out [T*k,N]

Cost: reads N K bytes of codes of each expert that got rows, once per ``block_m`` of them, and each block's rows of x
once per ``block_n`` outputs; 2 T k N K operations. A token is quantized once for all its experts, or once for each
where their static scales differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...quant.canonical import CanonicalWeight
from .. import reference
from ..quantized_input import InputFormat, QuantizedInput
from .expert_blocks import StreamedStack, blocks_of, expected_rows, input_rows, load_block, stack, stack_all
from .launch_scaled import scaled_launch
from .launch_table import LinearLaunch
from .quantize_rows import quantize_activation
from .runtime import device_arch
from .scaled_linear import constants, num_steps, scaled_product
from .scaled_weight import ScaledWeight


@dataclass(frozen=True, slots=True, eq=False)
class ScaledExperts:
    """``ScaledWeight`` of every expert, its tensors stacked, [E, ...].

    ``input_scales``, ``input_zeros`` float32 [E]: static ones that differ between the experts, else None.
    """

    shape: tuple[int, int]
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    sums: Tensor | None
    rows: int
    group: int
    common: int
    is_grouped: bool
    is_corrected: bool
    input: InputFormat | None
    input_scales: Tensor | None
    input_zeros: Tensor | None


@triton.jit(do_not_specialize=["num_blocks"])
def scaled_experts_kernel(
    x_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    x_scale_ptr: tl.tensor,
    x_zero_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    zeros_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    out_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    order_ptr: tl.tensor,
    blocks_ptr: tl.tensor,
    num_blocks: tl.tensor,
    num_experts: tl.tensor,
    choices_per_row: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    common: tl.tensor,
    x_group: tl.tensor,
    group: tl.tensor,
    scale_rows: tl.tensor,
    scale_row_stride: tl.tensor,
    scale_expert_stride: tl.tensor,
    sums_expert_stride: tl.tensor,
    x_scale_row_stride: tl.tensor,
    x_row_stride: tl.tensor,
    ALIGNED: tl.constexpr,
    KIND: tl.constexpr,
    GROUPING: tl.constexpr,
    X_SCALED: tl.constexpr,
    X_ZEROS: tl.constexpr,
    W_ZEROS: tl.constexpr,
    EVEN_K: tl.constexpr,
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
    rows = choices // choices_per_row
    code_rows = codes_ptr + (expert * N + outputs)[:, None] * K
    last_step = tl.where(has_expert, num_steps(K, common, GROUPING, BLOCK_K), 0)
    acc = scaled_product(
        x_ptr + rows[:, None] * x_row_stride, x_scale_ptr + rows * x_scale_row_stride,
        x_zero_ptr + rows * x_scale_row_stride, row_mask, code_rows, scales_ptr + expert * scale_expert_stride,
        zeros_ptr + expert * scale_expert_stride, sums_ptr + expert * sums_expert_stride, outputs, output_mask,
        0, last_step, N, K, common, x_group, group, scale_rows, scale_row_stride,
        KIND, GROUPING, X_SCALED, X_ZEROS, W_ZEROS, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    # Without an expert nothing was summed, but zero points would still be taken off.
    acc = tl.where(has_expert, acc, 0.0)
    out = out_ptr + choices[:, None] * N + outputs[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=row_mask[:, None] & output_mask[None, :])


def prepare(
    prepare_one: Callable[[CanonicalWeight, torch.dtype], ScaledWeight],
    weights: Sequence[CanonicalWeight],
    dtype: torch.dtype,
) -> ScaledExperts:
    """The experts' weights, each prepared by ``prepare_one`` of ``scaled_weight.py``, as one."""
    parts, codes = [], StreamedStack(len(weights))
    for weight in weights:
        part = prepare_one(weight, dtype)
        codes.put(part.codes)
        parts.append(replace(part, codes=part.codes.new_empty(0)))
    first = parts[0]
    inputs = [part.input for part in parts if part.input is not None]
    differ = any(not inputs[0].agrees(other) for other in inputs)
    return ScaledExperts(
        shape=first.shape,
        codes=codes.finish(),
        scales=stack([part.scales for part in parts]),
        zeros=stack_all([part.zeros for part in parts]),
        sums=stack_all([part.sums for part in parts]),
        rows=first.rows,
        group=first.group,
        common=first.common,
        is_grouped=first.is_grouped,
        is_corrected=first.is_corrected,
        input=first.input,
        input_scales=stack_all([given.scale for given in inputs]) if differ else None,
        input_zeros=stack_all([given.zero for given in inputs]) if differ else None,
    )


def scaled_experts(x: Tensor, experts: ScaledExperts, expert_ids: Tensor) -> Tensor:
    """x [T,K] or [T,k,K] -> [T,k,N]; the input is quantized as the experts want it."""
    inputs, choices_per_row = quantized_rows(x, experts, expert_ids)
    codes = inputs if isinstance(inputs, Tensor) else inputs.codes
    count = expected_rows(expert_ids, experts.codes.shape[0])
    ways = {"grouped": experts.is_grouped, "corrected": experts.is_corrected}
    launch = scaled_launch(device_arch(x.device), count, codes.element_size(), **ways)
    return launch_scaled(inputs, choices_per_row, experts, expert_ids, launch)


def quantized_rows(x: Tensor, experts: ScaledExperts, expert_ids: Tensor) -> tuple[Tensor | QuantizedInput, int]:
    """(rows of x as the experts want them, how many choices share one)."""
    rows, choices_per_row = input_rows(x, expert_ids)
    wanted = experts.input
    if wanted is None or rows.numel() == 0:
        return rows, choices_per_row
    if experts.input_scales is None:
        quantized = quantize_activation(rows, wanted.how, wanted.scale, wanted.zero, codes_dtype=wanted.codes_dtype)
        return quantized, choices_per_row
    ids = expert_ids.reshape(-1).clamp(min=0)
    scale, zero = (None if v is None else v[ids][:, None, None] for v in (experts.input_scales, experts.input_zeros))
    if choices_per_row > 1:
        rows = rows.repeat_interleave(choices_per_row, dim=0)
    how = replace(wanted.how, group_size=-1)
    return reference.quantize_activation(rows, how, scale, zero, codes_dtype=wanted.codes_dtype), 1


def launch_scaled(
    x: Tensor | QuantizedInput,
    choices_per_row: int,
    experts: ScaledExperts,
    expert_ids: Tensor,
    launch: LinearLaunch,
) -> Tensor:
    """[T,k,N] of rows as ``quantized_rows`` gives them, with the launch row given."""
    quantized = x if isinstance(x, QuantizedInput) else None
    codes = x if isinstance(x, Tensor) else x.codes
    width, features = experts.shape
    assert codes.shape[1] == features, f"x has {codes.shape[1]} features, the experts {features}"
    out = torch.empty((*expert_ids.shape, width), dtype=x.dtype, device=codes.device)
    if out.numel() == 0:
        return out
    blocks = blocks_of(expert_ids, experts.codes.shape[0], launch.block_m)
    x_scale = experts.scales if quantized is None else quantized.scale
    x_zero = None if quantized is None else quantized.zero
    one_scale = quantized is None or quantized.how.group_size == 0
    scaled_experts_kernel[(blocks.num_blocks, triton.cdiv(width, launch.block_n))](
        codes,
        experts.codes,
        x_scale,
        x_scale if x_zero is None else x_zero,
        experts.scales,
        experts.scales if experts.zeros is None else experts.zeros,
        experts.scales if experts.sums is None else experts.sums,
        out,
        *blocks.arguments(),
        choices_per_row,
        width,
        features,
        experts.common,
        features if quantized is None else quantized.group_size,
        experts.group,
        experts.rows,
        experts.scales.stride(1),
        experts.scales.stride(0),
        0 if experts.sums is None else experts.sums.stride(0),
        0 if one_scale else x_scale.shape[1],
        codes.stride(0),
        X_SCALED=quantized is not None,
        X_ZEROS=x_zero is not None,
        W_ZEROS=experts.zeros is not None,
        **scaled_constants(launch, experts.codes.dtype, features, experts.common, aligned=blocks.aligned),
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        **launch.options,
    )
    return out


def scaled_constants(
    launch: LinearLaunch, codes_dtype: torch.dtype, features: int, common: int, *, aligned: bool
) -> dict[str, Any]:
    """The compile-time arguments, but for which scales and zeros there are."""
    return {**constants(launch, codes_dtype, features, common), "ALIGNED": aligned}
