"""LoRA (Hu et al., 2021) for many adapters in one batch: ``out[t] += scale * B[id] @ (A[id] @ x[t])``.

Legend beside the usual one: L adapters, R the largest rank; an adapter of a smaller rank is filled up with zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .precision import wide


def lora_shrink(x: Tensor, a: Tensor, adapter_ids: Tensor) -> Tensor:
    """x [T,K], a [L,R,K], adapter_ids int32 [T], -1 for none -> [T,R] float32; zeros where there is no adapter.

    Float64 in, float64 out. This definition multiplies every row with every adapter: L times the work of a kernel.
    """
    values = wide(x)
    result = values.new_zeros((x.shape[0], a.shape[1]))
    for adapter in range(a.shape[0]):
        product = values @ a[adapter].to(values.dtype).T
        result = torch.where((adapter_ids == adapter)[:, None], product, result)
    return result


def lora_expand(y: Tensor, b: Tensor, adapter_ids: Tensor, out: Tensor, scales: Tensor) -> None:
    """Adds ``scales[id] * y @ b[id].T`` to out [T,N], in place.

    y [T,R] as ``lora_shrink`` gives it, b [L,N,R], adapter_ids int32 [T], -1: the row of ``out`` stays as it is;
    scales float32 [L], ``alpha / rank`` of each adapter.
    """
    for adapter in range(b.shape[0]):
        sums = wide(out) + (y @ b[adapter].to(y.dtype).T) * scales[adapter].to(y.dtype)
        out.copy_(torch.where((adapter_ids == adapter)[:, None], sums.to(out.dtype), out))
