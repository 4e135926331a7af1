"""Random adapters of different ranks, and what they add, one row at a time in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LoraCase:
    """``x`` [T,K], ``a`` [L,R,K], ``b`` [L,N,R], ``ids`` int32 [T], ``scales`` [L]; ranks below R end in zeros."""

    x: Tensor
    a: Tensor
    b: Tensor
    ids: Tensor
    scales: Tensor
    out: Tensor

    def shrunk(self) -> Tensor:
        """float64 [T,R]: row by row, only the adapter's own rank."""
        rows = [
            torch.zeros(self.a.shape[1], dtype=torch.float64)
            if adapter < 0
            else (self.a[adapter].double() * self.x[row].double()).sum(1)
            for row, adapter in enumerate(self.ids.tolist())
        ]
        return torch.stack(rows) if rows else torch.zeros(0, self.a.shape[1], dtype=torch.float64)

    def expanded(self, y: Tensor) -> Tensor:
        """float64 [T,N] from y [T,R]."""
        result = self.out.double().clone()
        for row, adapter in enumerate(self.ids.tolist()):
            if adapter >= 0:
                result[row] += self.scales[adapter].double() * (self.b[adapter].double() * y[row].double()).sum(1)
        return result


def make_lora_case(
    ids: list[int], num_adapters: int, rank: int, in_features: int, out_features: int, dtype: torch.dtype
) -> LoraCase:
    """Adapter 0 has the full rank, the others a part of it, the least 1."""
    generator = torch.Generator().manual_seed(rank + in_features)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    a, b = randn(num_adapters, rank, in_features) / in_features**0.5, randn(num_adapters, out_features, rank)
    for adapter in range(num_adapters):
        own = max(1, rank >> adapter)
        a[adapter, own:] = 0
        b[adapter, :, own:] = 0
    return LoraCase(
        x=randn(len(ids), in_features).to(dtype),
        a=a.to(dtype),
        b=b.to(dtype),
        ids=torch.tensor(ids, dtype=torch.int32),
        scales=torch.rand(num_adapters, generator=generator) + 0.5,
        out=randn(len(ids), out_features).to(dtype),
    )
