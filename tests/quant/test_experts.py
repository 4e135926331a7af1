"""Bringing experts to one scheme changes no value."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from twofold.quant.canonical import CanonicalWeight, EightBitWeight, PackedWeight, dequantize, pack
from twofold.quant.experts import common_scheme, with_scheme
from twofold.quant.scheme import Activation, Dense, Element, Fp8, Int8, LowBit, Offset, Scheme, WeightOnly

ROWS, COLUMNS = 12, 96
SHAPE = (ROWS, COLUMNS)
TOKEN = Activation(Element.INT8)
STATIC = Activation(Element.INT8, 0, dynamic=False)


def integers(scheme: WeightOnly | Offset | LowBit, seed: int) -> PackedWeight:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**scheme.bits, SHAPE, generator=generator)
    scales = torch.rand(ROWS, scheme.num_groups(COLUMNS), generator=generator)
    zeros = None
    if not scheme.symmetric:
        zeros = torch.randint(0, 2**scheme.bits, scales.shape, generator=generator)
        zeros = -scales * (zeros + 0.25) if isinstance(scheme, Offset) else zeros.to(torch.uint8)
    perm = torch.randperm(COLUMNS, generator=generator).to(torch.int32) if scheme.act_order else None
    static = isinstance(scheme, LowBit) and not scheme.activation.dynamic
    return PackedWeight(
        scheme, SHAPE, pack(codes, scheme.bits), scales, zeros, perm,
        torch.tensor(0.5) if static else None,
        torch.tensor(3.0) if static and not scheme.activation.symmetric else None,
    )  # fmt: skip


def eight_bits(scheme: Int8 | Fp8, seed: int) -> EightBitWeight:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-100, 100, SHAPE, generator=generator)
    scales = torch.rand(scheme.num_blocks(SHAPE), generator=generator)
    if isinstance(scheme, Fp8):
        return EightBitWeight(scheme, codes.float().to(torch.float8_e4m3fn), scales)
    zeros = None if scheme.symmetric else torch.randint(-9, 9, scales.shape, generator=generator).to(torch.int8)
    return EightBitWeight(scheme, codes.to(torch.int8), scales, zeros)


@pytest.mark.parametrize(
    "schemes",
    [
        [WeightOnly(4, 32), WeightOnly(4, 32, symmetric=False)],
        [WeightOnly(4, 32), WeightOnly(4, 32, act_order=True)],
        [WeightOnly(4, 64), WeightOnly(4, 32), WeightOnly(4, -1, symmetric=False)],
        [Offset(4, 32), Offset(4, 64)],
        [LowBit(4, 32, activation=STATIC), LowBit(4, 32, activation=replace(STATIC, symmetric=False))],
        [Int8((-1, -1), TOKEN), Int8((1, -1), TOKEN, symmetric=False)],
        [Fp8((-1, -1)), Fp8((1, -1))],
        [Fp8((8, 32)), Fp8((4, 32))],
    ],
    ids=str,
)
def test_values_stay_and_the_scheme_is_one(schemes: list[Scheme]) -> None:
    weights: list[CanonicalWeight] = [
        eight_bits(scheme, seed) if isinstance(scheme, Int8 | Fp8) else integers(scheme, seed)  # type: ignore[arg-type]
        for seed, scheme in enumerate(schemes)
    ]
    common = common_scheme(schemes, SHAPE)
    assert common is not None
    for weight in weights:
        changed = with_scheme(weight, common)
        assert changed.scheme == common
        assert torch.equal(dequantize(changed), dequantize(weight))
        if isinstance(weight, PackedWeight) and weight.input_scale is not None:
            before = 0.0 if weight.input_zero is None else float(weight.input_zero)
            assert isinstance(changed, PackedWeight) and changed.input_zero is not None
            assert float(changed.input_zero) == before


@pytest.mark.parametrize(
    "schemes",
    [
        [WeightOnly(4, 32), WeightOnly(8, 32)],
        [WeightOnly(4, 32), Dense()],
        [Fp8((1, -1)), Fp8((1, -1), Activation(Element.FP8))],
        [Fp8((128, 128)), Fp8((1, -1))],
        [Int8((1, -1), TOKEN), Int8((1, -1), STATIC)],
    ],
    ids=str,
)
def test_schemes_without_a_common_one(schemes: list[Scheme]) -> None:
    assert common_scheme(schemes, SHAPE) is None


def test_equal_schemes_of_any_kind() -> None:
    assert common_scheme([Dense(), Dense()], SHAPE) == Dense()
