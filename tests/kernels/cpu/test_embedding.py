"""Rows of an embedding in C, packed or in a head's panels: bit for bit what ``dequantize`` gives."""

from __future__ import annotations

import pytest
import torch
from twofold.engine.layers.embedding import Embedding
from twofold.kernels.cpu import linear, linear_bf16, linear_int8
from twofold.kernels.cpu.embedding import embed_packed, embed_panels, look_up, look_up_bf16
from twofold.kernels.cpu.library import unavailable
from twofold.kernels.kernel_set import KernelSet
from twofold.kernels.problems import LinearProblem
from twofold.platforms.cpu import CpuPlatform
from twofold.quant.canonical import DenseWeight, PackedWeight, dequantize, pack
from twofold.quant.scheme import Dense, Offset, WeightOnly

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


SCHEMES = [
    *(WeightOnly(bits, 32, symmetric=bits % 2 == 0) for bits in (2, 3, 4, 5, 6, 8)),
    WeightOnly(2, 32, symmetric=False),
    WeightOnly(3, 32),
    WeightOnly(8, 32, symmetric=False),
    Offset(4, 16),
    Offset(8, 32),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# A last panel with lanes beyond the rows, and rows of every lane.
ROWS = 77


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("columns", [40, 576])
def test_rows(scheme, dtype, columns):
    if isinstance(scheme, Offset) and dtype is torch.float32:
        dtype = torch.float16  # only products of 16-bit scales are exact, and no format has others
    weight = packed(scheme, 50, columns, dtype)
    for ids in ([7], [0, 49, 7, 7], list(range(50)), []):
        places = torch.tensor(ids, dtype=torch.int64)
        assert torch.equal(embed_packed(places, weight), dequantize(weight)[places])


def check_panels(prepared, expected):
    for ids in ([7], [0, 76, 7, 7], list(range(ROWS)), []):
        places = torch.tensor(ids, dtype=torch.int64)
        assert torch.equal(embed_panels(places, prepared), expected[places])


PREPARES = {
    "float32": linear.prepare_low_bit,
    "int8": linear_int8.prepare,
    "int16": linear_int8.prepare_two_planes,
    "bf16": linear_bf16.prepare,
}


@pytest.mark.parametrize("kernel", PREPARES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("columns", [80, 576])
def test_rows_of_a_heads_codes(scheme, dtype, columns, kernel):
    if kernel == "bf16" and linear_bf16.missing() is not None:
        pytest.skip(f"no products in bfloat16: {linear_bf16.missing()}")
    if isinstance(scheme, Offset) and dtype is torch.float32:
        dtype = torch.float16  # as above
    weight = packed(scheme, ROWS, columns, dtype)
    expected = dequantize(weight)
    check_panels(PREPARES[kernel](weight, torch.float32), expected)


@pytest.mark.parametrize("columns", [63, 66, 576])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_a_heads_floats(dtype, columns):
    matrix = torch.randn(ROWS, columns).to(dtype)
    check_panels(linear.prepare_dense(DenseWeight(matrix), torch.float32), matrix.float())
    if linear_bf16.missing() is None and dtype is torch.bfloat16:
        check_panels(linear_bf16.prepare(DenseWeight(matrix), torch.float32), matrix.float())


def test_which_heads_give_rows_back():
    def problem(scheme):
        return LinearProblem(scheme=scheme, in_features=64, out_features=ROWS, dtype=torch.float32)

    for dtype in DTYPES:
        assert look_up(problem(Dense()), dtype) is embed_panels
        exact = embed_panels if dtype is torch.bfloat16 else None
        assert look_up_bf16(problem(Dense()), dtype) is exact
    assert look_up_bf16(problem(WeightOnly(8, 32)), None) is embed_panels
    assert look_up(problem(WeightOnly(4, 32, act_order=True)), None) is None


def test_the_layer_takes_the_kernel_and_scales():
    weight = packed(WeightOnly(8, 32), 20, 64, torch.float16)
    layer = Embedding(weight, 8.0, kernels=KernelSet(CpuPlatform().spec))
    plain, ids = Embedding(weight, 8.0), torch.tensor([3, 19])
    assert layer._embed is embed_packed
    assert torch.equal(layer(ids), plain(ids)) and torch.equal(plain(ids), dequantize(weight)[ids] * 8.0)
