"""RMSNorm, alone or fused with the residual addition in front of it.

    y = x / sqrt(mean(x^2) + eps) * (weight + offset)        over the last dimension, in float32

Cost per row of K: reads K (fused 2 K), writes K (fused 2 K) elements; the weight is read once per program and stays in
cache; about 4 K operations. A row of up to ``MAX_TILE`` elements is read once; a longer one twice, the second time
from cache.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch_table import RowLaunch, row_launch
from .runtime import device_arch

MAX_TILE = 16384


@triton.jit
def rms_norm_kernel(
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    new_residual_ptr: tl.tensor,
    num_rows: tl.tensor,
    inner: tl.tensor,
    x_outer_stride: tl.tensor,
    x_inner_stride: tl.tensor,
    eps: tl.tensor,
    offset: tl.tensor,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    ADD: tl.constexpr,
) -> None:
    # Row r lies at (r // inner) * x_outer_stride + (r % inner) * x_inner_stride, so that the heads of a slice of a
    # fused QKV projection need no copy. residual, out and new_residual are contiguous.
    rows = (tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
    row_mask = (rows < num_rows)[:, None]
    x_rows = x_ptr + ((rows // inner) * x_outer_stride + (rows % inner) * x_inner_stride)[:, None]
    flat = (rows * K)[:, None]
    columns = tl.arange(0, BLOCK_K)[None, :]
    if BLOCK_K >= K:
        mask = row_mask & (columns < K)
        x = tl.load(x_rows + columns, mask=mask, other=0.0).to(tl.float32)
        if ADD:
            x += tl.load(residual_ptr + flat + columns, mask=mask, other=0.0).to(tl.float32)
            rounded = x.to(new_residual_ptr.dtype.element_ty)
            tl.store(new_residual_ptr + flat + columns, rounded, mask=mask)
            x = rounded.to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=1) / K + eps)
        weight = tl.load(weight_ptr + columns, mask=columns < K, other=0.0).to(tl.float32) + offset
        tl.store(out_ptr + flat + columns, (x * scale[:, None] * weight).to(out_ptr.dtype.element_ty), mask=mask)
    else:
        squares = tl.zeros([BLOCK_ROWS, BLOCK_K], dtype=tl.float32)
        for start in range(0, K, BLOCK_K):
            mask = row_mask & (start + columns < K)
            x = tl.load(x_rows + start + columns, mask=mask, other=0.0).to(tl.float32)
            if ADD:
                x += tl.load(residual_ptr + flat + start + columns, mask=mask, other=0.0).to(tl.float32)
                rounded = x.to(new_residual_ptr.dtype.element_ty)
                tl.store(new_residual_ptr + flat + start + columns, rounded, mask=mask)
                x = rounded.to(tl.float32)
            squares += x * x
        scale = 1.0 / tl.sqrt(tl.sum(squares, axis=1) / K + eps)
        for start in range(0, K, BLOCK_K):
            mask = row_mask & (start + columns < K)
            x = tl.load(x_rows + start + columns, mask=mask, other=0.0).to(tl.float32)
            if ADD:
                # Recomputed from the inputs: another warp's store of new_residual may not be visible yet.
                x += tl.load(residual_ptr + flat + start + columns, mask=mask, other=0.0).to(tl.float32)
                x = x.to(new_residual_ptr.dtype.element_ty).to(tl.float32)
            weight = tl.load(weight_ptr + start + columns, mask=start + columns < K, other=0.0).to(tl.float32) + offset
            y = (x * scale[:, None] * weight).to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + flat + start + columns, y, mask=mask)


def constants(columns: int, launch: RowLaunch) -> dict[str, Any]:
    """The compile-time arguments for rows of ``columns`` elements."""
    block_k = min(triton.next_power_of_2(columns), MAX_TILE)
    return {"K": columns, "BLOCK_K": block_k, "BLOCK_ROWS": max(1, launch.elements // block_k)}


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """``x`` [..., K] normalized over K, times ``weight`` [K] plus ``offset``. Result in ``x``'s dtype, contiguous."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, None, weight, out, None, eps, offset)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    """(normalized, new residual) of ``x + residual`` [..., K]; the sum is rounded before it is normalized."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    new_residual = torch.empty(x.shape, dtype=residual.dtype, device=x.device)
    _launch(x, residual.contiguous(), weight, out, new_residual, eps, offset)
    return out, new_residual


def _launch(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    out: Tensor,
    new_residual: Tensor | None,
    eps: float,
    offset: float,
) -> None:
    columns = x.shape[-1]
    num_rows = x.numel() // columns if columns else 0
    if num_rows == 0:
        return
    x, inner, outer_stride, inner_stride = _row_strides(x)
    launch = row_launch(device_arch(x.device), columns)
    values = constants(columns, launch)
    grid = (triton.cdiv(num_rows, values["BLOCK_ROWS"]),)
    rms_norm_kernel[grid](
        x,
        x if residual is None else residual,
        weight,
        out,
        out if new_residual is None else new_residual,
        num_rows,
        inner,
        outer_stride,
        inner_stride,
        eps,
        offset,
        ADD=residual is not None,
        **values,
        num_warps=launch.num_warps,
    )


def _row_strides(x: Tensor) -> tuple[Tensor, int, int, int]:
    """(x, rows per outer step, outer stride, inner stride); copies only what two strides cannot describe."""
    if x.dim() == 3 and x.stride(-1) == 1:
        return x, x.shape[1], x.stride(0), x.stride(1)
    if x.dim() == 2 and x.stride(-1) == 1:
        return x, 1, x.stride(0), 0
    x = x.contiguous()
    return x, 1, x.shape[-1], 0
