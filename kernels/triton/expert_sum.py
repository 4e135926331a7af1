"""The weighted sum over a token's experts: out[t] = sum over j of weight[t, j] * rows[t, j].

    rows [T,k,N]   weights float32 [T,k]   out [T,N] in rows' dtype

Cost: reads k elements, writes one per result; 2 k operations. The terms are added in float32 in the order of j.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 512


@triton.jit
def sum_experts_kernel(
    rows_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    out_ptr: tl.tensor,
    N: tl.tensor,
    top_k: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for choice in range(0, top_k):
        weight = tl.load(weights_ptr + token * top_k + choice)
        row = tl.load(rows_ptr + (token * top_k + choice) * N + column, mask=column < N, other=0.0)
        total += weight * row.to(tl.float32)
    tl.store(out_ptr + token * N + column, total.to(out_ptr.dtype.element_ty), mask=column < N)


def sum_experts(rows: Tensor, routing_weights: Tensor) -> Tensor:
    """rows [T,k,N] -> [T,N]."""
    tokens, top_k, width = rows.shape
    out = torch.empty((tokens, width), dtype=rows.dtype, device=rows.device)
    if out.numel():
        weights = routing_weights.float().contiguous()
        sum_experts_kernel[(tokens, triton.cdiv(width, BLOCK))](
            rows, weights, out, width, top_k, BLOCK=BLOCK, num_warps=4
        )
    return out
