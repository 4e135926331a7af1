"""The packed matmul and the dequantizer against x @ dequantize(weight).T in float64."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from tolerance import assert_near
from torch import Tensor
from twofold.kernels.triton.dequantize import dequantize, dequantized_linear
from twofold.kernels.triton.launch_table import LinearLaunch
from twofold.kernels.triton.packed_linear import launch_linear, num_splits, packed_linear
from twofold.kernels.triton.packed_weight import grouping, prepare
from twofold.quant import canonical
from twofold.quant.canonical import PackedWeight
from twofold.quant.scheme import Offset, WeightOnly

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SMALL = LinearLaunch(16, 32, 64, 4, 1)


def make_weight(
    outputs: int,
    features: int,
    bits: int,
    group: int,
    *,
    symmetric: bool = True,
    act_order: bool = False,
    seed: int = 0,
) -> PackedWeight:
    generator = torch.Generator().manual_seed(seed)
    scheme = WeightOnly(bits, group, symmetric, act_order)
    groups = scheme.num_groups(features)
    codes = torch.randint(0, 2**bits, (outputs, features), generator=generator)
    zeros = torch.randint(0, 2**bits, (outputs, groups), generator=generator).to(torch.uint8)
    return PackedWeight(
        scheme=scheme,
        shape=(outputs, features),
        qweight=canonical.pack(codes, bits),
        scales=(torch.randn(outputs, groups, generator=generator) / 2**bits).half(),
        zeros=None if symmetric else zeros,
        perm=torch.randperm(features, generator=generator).int() if act_order else None,
    )


def with_offsets(weight: PackedWeight, dtype: torch.dtype) -> PackedWeight:
    """The same codes and scales with a random offset per group instead of zeros."""
    scheme = Offset(weight.scheme.bits, weight.scheme.group_size)
    offsets = torch.randn(weight.scales.shape, generator=torch.Generator().manual_seed(9)).to(dtype)
    return replace(weight, scheme=scheme, scales=weight.scales.to(dtype), zeros=offsets)


def make_rows(rows: int, features: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(rows, features, generator=torch.Generator().manual_seed(seed + 1)).to(dtype)


def check(x: Tensor, weight: PackedWeight, actual: Tensor, bias: Tensor | None = None) -> None:
    """Terms are independent, so rounding each to x's dtype errs by a roundoff of the root of their squared sum."""
    dense = canonical.dequantize(weight, torch.float32).double()
    expected = x.double() @ dense.T
    scale = (x.double().square() @ dense.square().T).sqrt()
    if bias is not None:
        expected, scale = expected + bias.double(), scale + bias.double().abs()
    assert_near((actual.double() / (scale + 1e-9)).to(actual.dtype), expected / (scale + 1e-9), factor=4.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [32, 64, -1])
def test_schemes(dtype: torch.dtype, bits: int, symmetric: bool, group: int) -> None:
    weight = make_weight(40, 192, bits, group, symmetric=symmetric)
    x = make_rows(3, 192, dtype)
    check(x, weight, launch_linear(x, prepare(weight, dtype), None, SMALL, 1))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("group", [16, 20, 64, -1])
@pytest.mark.parametrize("stored", [torch.float16, torch.float32], ids=str)
def test_offsets_instead_of_zeros(bits: int, group: int, stored: torch.dtype) -> None:
    weight = with_offsets(make_weight(40, 192, bits, group), stored)
    for dtype in (torch.bfloat16, torch.float32):
        x, prepared = make_rows(3, 192, dtype), prepare(weight, dtype)
        check(x, weight, launch_linear(x, prepared, None, SMALL, 1))
        assert torch.equal(dequantize(prepared, dtype, 8, 30), canonical.dequantize(weight, dtype)[8:38])


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(
    ("features", "group"), [(144, 48), (144, 36), (144, -1), (20, 5), (100, 32), (1, -1), (192, 128)]
)
def test_ragged_features_and_groups(bits: int, features: int, group: int) -> None:
    weight = make_weight(17, features, bits, group, symmetric=False)
    x = make_rows(5, features, torch.float32)
    check(x, weight, launch_linear(x, prepare(weight, x.dtype), None, SMALL, 1))


@pytest.mark.parametrize(("rows", "outputs"), [(1, 1), (16, 33), (33, 100), (0, 8)])
def test_ragged_rows_outputs_and_bias(rows: int, outputs: int) -> None:
    weight, x, bias = (
        make_weight(outputs, 128, 4, 128),
        make_rows(rows, 128, torch.bfloat16),
        torch.randn(outputs).bfloat16(),
    )
    check(x, weight, launch_linear(x, prepare(weight, x.dtype), bias, SMALL, 1), bias)


@pytest.mark.parametrize("splits", [2, 3, 7])
@pytest.mark.parametrize("rows", [1, 5])
def test_split_features(splits: int, rows: int) -> None:
    weight, x, bias = (
        make_weight(40, 448, 4, 64, symmetric=False),
        make_rows(rows, 448, torch.float16),
        torch.randn(40).half(),
    )
    check(x, weight, launch_linear(x, prepare(weight, x.dtype), bias, SMALL, splits), bias)


@pytest.mark.parametrize("rows", [2, 20, 600])
def test_act_order_gathers_the_input(rows: int) -> None:
    weight, x = make_weight(24, 128, 4, 32, act_order=True), make_rows(rows, 128, torch.float32)
    check(x, weight, packed_linear(x, prepare(weight, x.dtype)))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(("features", "group"), [(192, 64), (144, 36), (20, -1)])
def test_dequantizer_equals_the_definition(bits: int, features: int, group: int) -> None:
    weight = make_weight(70, features, bits, group, symmetric=bits == 3)
    prepared = prepare(weight, torch.bfloat16)
    expected = canonical.dequantize(weight, torch.bfloat16)
    assert torch.equal(dequantize(prepared, torch.bfloat16, 0, 70), expected)
    assert torch.equal(dequantize(prepared, torch.bfloat16, 33, 20), expected[33:53])


def test_many_rows_take_the_dense_product(monkeypatch: pytest.MonkeyPatch) -> None:
    from twofold.kernels.triton import dequantize as module

    monkeypatch.setattr(module, "MAX_CHUNK_BYTES", 64 * 4 * 40)
    weight, x, bias = make_weight(100, 64, 4, 32, act_order=True), make_rows(70, 64, torch.float32), torch.randn(100)
    check(x, weight, dequantized_linear(x, prepare(weight, x.dtype), bias), bias)


def test_any_leading_dimensions_and_strides() -> None:
    weight, x = make_weight(16, 64, 4, 32), make_rows(6, 128, torch.float32)[:, ::2]
    prepared = prepare(weight, x.dtype)
    check(x, weight, packed_linear(x, prepared))
    check(x, weight, packed_linear(x.reshape(2, 3, 64), prepared).view(6, 16))


def test_float32_and_bfloat16_scales() -> None:
    for scale_dtype in (torch.float32, torch.bfloat16):
        half = make_weight(16, 64, 4, 32)
        weight = PackedWeight(
            scheme=half.scheme, shape=half.shape, qweight=half.qweight, scales=half.scales.to(scale_dtype)
        )
        x = make_rows(2, 64, torch.float32)
        check(x, weight, launch_linear(x, prepare(weight, x.dtype), None, SMALL, 1))


def test_grouping_and_number_of_splits() -> None:
    assert [grouping(group, 128, 8) for group in (128, 256, 64, 100, 36)] == ["tile", "tile", "unit", "code", "code"]
    launch = LinearLaunch(16, 64, 128, 4, 3)
    assert num_splits(1, (4096, 4096), launch, cores=132) == 5
    assert num_splits(1, (4096, 4096), launch, cores=16) == 1
    assert num_splits(17, (4096, 4096), launch, cores=132) == 1


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_random_problems(seed: int) -> None:
    draw = random.Random(seed)
    features = draw.choice([16, 96, 144, 160, 256, 320])
    group = draw.choice([-1, *(size for size in (16, 20, 32, 36, 48, 64, 128) if features % size == 0)])
    weight = make_weight(
        draw.choice([1, 15, 64, 100]),
        features,
        draw.choice([2, 3, 4, 8]),
        group,
        symmetric=draw.random() < 0.5,
        act_order=draw.random() < 0.3,
        seed=seed,
    )
    x = make_rows(draw.choice([1, 2, 16, 17, 50]), features, draw.choice(DTYPES), seed)
    launch = LinearLaunch(draw.choice([16, 32, 64]), draw.choice([16, 32, 64]), draw.choice([32, 64, 128]), 4, 1)
    check(x, weight, launch_linear(x, prepare(weight, x.dtype), None, launch, draw.choice([1, 2, 4])))
