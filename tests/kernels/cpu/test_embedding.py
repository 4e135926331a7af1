"""Rows of a packed embedding in C: bit for bit what ``dequantize`` gives."""

from __future__ import annotations

import pytest
import torch
from twofold.engine.layers.embedding import Embedding
from twofold.kernels.cpu.embedding import embed_packed
from twofold.kernels.cpu.library import unavailable
from twofold.kernels.kernel_set import KernelSet
from twofold.platforms.cpu import CpuPlatform
from twofold.quant.canonical import PackedWeight, dequantize, pack
from twofold.quant.scheme import Offset, WeightOnly

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=f"no compiled kernels: {unavailable()}")


def packed(scheme: WeightOnly | Offset, rows: int, columns: int, dtype: torch.dtype) -> PackedWeight:
    generator = torch.Generator().manual_seed(rows + columns)
    codes = torch.randint(0, 2**scheme.bits, (rows, columns), generator=generator)
    groups = scheme.num_groups(columns)
    scales = torch.randn(rows, groups, generator=generator).to(dtype)
    zeros = None
    if isinstance(scheme, Offset):
        zeros = torch.randn(rows, groups, generator=generator).to(dtype)
    elif not scheme.symmetric:
        zeros = torch.randint(0, 2**scheme.bits, (rows, groups), generator=generator).to(torch.uint8)
    return PackedWeight(scheme, (rows, columns), pack(codes, scheme.bits), scales, zeros)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "scheme",
    [*(WeightOnly(bits, 32, symmetric=bits % 2 == 0) for bits in (2, 3, 4, 5, 6, 8)), Offset(4, 16), Offset(8, 32)],
    ids=str,
)
@pytest.mark.parametrize("columns", [40, 576])
def test_rows(scheme, dtype, columns):
    if isinstance(scheme, Offset) and dtype is torch.float32:
        dtype = torch.float16  # only products of 16-bit scales are exact, and no format has others
    weight = packed(scheme, 50, columns, dtype)
    for ids in ([7], [0, 49, 7, 7], list(range(50)), []):
        places = torch.tensor(ids, dtype=torch.int64)
        assert torch.equal(embed_packed(places, weight), dequantize(weight)[places])


def test_the_layer_takes_the_kernel_and_scales():
    weight = packed(WeightOnly(8, 32), 20, 64, torch.float16)
    layer = Embedding(weight, 8.0, kernels=KernelSet(CpuPlatform().spec))
    plain, ids = Embedding(weight, 8.0), torch.tensor([3, 19])
    assert layer._embed is embed_packed
    assert torch.equal(layer(ids), plain(ids)) and torch.equal(plain(ids), dequantize(weight)[ids] * 8.0)
