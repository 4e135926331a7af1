"""The canonical layout: what it stands for, and when weights share a matrix."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from twofold.quant.canonical import (
    DenseWeight,
    EightBitWeight,
    MicroScaledWeight,
    PackedWeight,
    dequantize,
    int8_as_packed,
    merge,
    pack,
)
from twofold.quant.scheme import Activation, Dense, Element, Fp8, Int8, LowBit, MicroScaled, Offset, WeightOnly


def packed(
    rows: int, columns: int, scheme: WeightOnly, seed: int = 0, perm: torch.Tensor | None = None
) -> tuple[PackedWeight, torch.Tensor]:
    """A random weight and its matrix, from the definition, element by element."""
    random = torch.Generator().manual_seed(seed)
    groups, size = scheme.num_groups(columns), scheme.resolved_group_size(columns)
    codes = torch.randint(0, 2**scheme.bits, (rows, columns), generator=random)
    scales = torch.randn(rows, groups, generator=random)
    zeros = None if scheme.symmetric else torch.randint(0, 2**scheme.bits, (rows, groups), generator=random)
    matrix = torch.empty(rows, columns)
    for n in range(rows):
        for j in range(columns):
            zero = 2 ** (scheme.bits - 1) if zeros is None else int(zeros[n, j // size])
            k = j if perm is None else int(perm[j])
            matrix[n, k] = (int(codes[n, j]) - zero) * scales[n, j // size]
    stored = None if zeros is None else zeros.to(torch.uint8)
    return PackedWeight(scheme, (rows, columns), pack(codes, scheme.bits), scales, stored, perm), matrix


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("group_size", [-1, 16, 24])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("act_order", [True, False])
def test_dequantize_is_the_definition(bits: int, group_size: int, symmetric: bool, act_order: bool) -> None:
    perm = torch.randperm(64, generator=torch.Generator().manual_seed(3)).to(torch.int32) if act_order else None
    weight, matrix = packed(6, 64, WeightOnly(bits, group_size, symmetric, act_order), perm=perm)
    assert torch.equal(dequantize(weight), matrix)
    assert weight.num_groups == weight.scales.shape[1]


def test_merge_stacks_equal_schemes() -> None:
    scheme = WeightOnly(4, 16, symmetric=False)
    parts = [packed(rows, 64, scheme, seed=rows) for rows in (8, 4, 12)]
    merged = merge([weight for weight, _ in parts])
    assert len(merged) == 1 and merged[0].shape == (24, 64)
    assert torch.equal(dequantize(merged[0]), torch.cat([matrix for _, matrix in parts]))


def test_merge_keeps_what_does_not_fit() -> None:
    four, _ = packed(8, 64, WeightOnly(4, 16))
    eight, _ = packed(8, 64, WeightOnly(8, 16))
    asym, _ = packed(8, 64, WeightOnly(4, 16, symmetric=False))
    plain = DenseWeight(torch.randn(8, 64))
    for parts in ([four, eight], [four, asym], [four, plain], [plain, DenseWeight(torch.randn(8, 32))]):
        assert merge(list(parts)) == list(parts)


def test_merge_compares_gathers() -> None:
    scheme = WeightOnly(4, 16, act_order=True)
    first, second = torch.randperm(64).to(torch.int32), torch.arange(64, dtype=torch.int32).flip(0)
    a, b, c = (packed(8, 64, scheme, seed=i, perm=p)[0] for i, p in enumerate((first, first, second)))
    assert len(merge([a, b])) == 1
    assert len(merge([a, c])) == 2


def test_merge_stacks_dense_weights() -> None:
    parts = [DenseWeight(torch.randn(rows, 16)) for rows in (3, 5)]
    (merged,) = merge(list(parts))
    assert torch.equal(dequantize(merged), torch.cat([part.weight for part in parts]))


def test_schemes_are_keys_with_short_names() -> None:
    assert {WeightOnly(4, 32): 1, Dense(): 2}[WeightOnly(4, 32)] == 1
    names = [str(s) for s in (WeightOnly(4, 32), WeightOnly(8, -1, False), WeightOnly(3, 64, True, True), Dense())]
    assert names == ["w4g32 sym", "w8 channel asym", "w3g64 sym act-order", "dense"]


def eight_bit(rows: int, block: tuple[int, int], seed: int, input_scale: float | None = None) -> EightBitWeight:
    random = torch.Generator().manual_seed(seed)
    static = input_scale is not None
    scheme = Int8(block, Activation(Element.INT8, 0 if static else -1, dynamic=not static))
    codes = torch.randint(-128, 128, (rows, 20), generator=random, dtype=torch.int8)
    scales = torch.rand(scheme.num_blocks((rows, 20)), generator=random)
    return EightBitWeight(scheme, codes, scales, input_scale=None if not static else torch.tensor(input_scale))


@pytest.mark.parametrize("block", [(-1, -1), (1, -1), (1, 7), (4, 6), (16, 20)])
def test_eight_bit_blocks_by_definition_alone_and_stacked(block: tuple[int, int]) -> None:
    parts = [eight_bit(rows, block, seed) for seed, rows in enumerate((10, 6, 13))]
    for part in parts:
        high, wide = (side if b == -1 else b for side, b in zip(part.shape, block, strict=True))
        for n in range(part.shape[0]):
            for k in range(20):
                expected = part.codes[n, k].item() * part.scales[n // high, k // wide].item()
                assert part.dequantize()[n, k].item() == pytest.approx(expected, rel=1e-6)
    (merged,) = merge(list(parts))
    assert torch.equal(dequantize(merged), torch.cat([part.dequantize() for part in parts]))


def test_eight_bit_weights_that_do_not_fit() -> None:
    first = eight_bit(8, (1, -1), 0, 0.5)
    for other in (eight_bit(8, (1, -1), 1, 0.25), eight_bit(8, (1, 10), 1, 0.5), eight_bit(8, (1, -1), 1)):
        assert merge([first, other]) == [first, other]


@pytest.mark.parametrize("block", [(-1, -1), (1, -1), (1, 8), (4, 8)])
@pytest.mark.parametrize("asymmetric", [False, True])
def test_int8_as_unsigned_codes(block: tuple[int, int], asymmetric: bool) -> None:
    weight = eight_bit(10, block, 3)
    if asymmetric:
        zeros = torch.randint(-128, 128, weight.scales.shape, dtype=torch.int8)
        weight = replace(weight, scheme=replace(weight.scheme, symmetric=False), zeros=zeros)
    packed_weight = int8_as_packed(weight)
    torch.testing.assert_close(dequantize(packed_weight), weight.dequantize(), rtol=1e-6, atol=0)


def test_small_floats_stack_with_their_own_divisors() -> None:
    scheme = MicroScaled(Element.FP4, 16, False)
    parts = [
        MicroScaledWeight(
            scheme,
            (rows, 32),
            torch.randint(0, 256, (rows, 16), dtype=torch.uint8),
            torch.rand(rows, 2).to(torch.float8_e4m3fn),
            torch.tensor([[divisor]]),
        )
        for rows, divisor in ((4, 2.0), (6, 5.0))
    ]
    (merged,) = merge(list(parts))
    assert torch.equal(dequantize(merged), torch.cat([part.dequantize() for part in parts]))
    assert merge([parts[0], DenseWeight(torch.randn(4, 32))])[0] is parts[0]


def test_names_of_8_bit_schemes() -> None:
    token, static = Activation(Element.FP8), Activation(Element.INT8, 0, dynamic=False, symmetric=False)
    micro = Activation(Element.FP4, 32, power_of_two=True)
    schemes = (
        LowBit(4, 128, activation=token),
        Int8((1, -1), static),
        Fp8((128, 128), Activation(Element.FP8, 128)),
        Fp8((-1, -1)),
        MicroScaled(Element.FP4, 32, True, micro),
        Offset(4, 32),
    )
    assert [str(scheme) for scheme in schemes] == [
        "w4g128 sym a-fp8 token",
        "int8 channel a8 tensor static asym",
        "fp8 128x128 a-fp8 g128",
        "fp8 tensor",
        "mxfp4 g32 a-mxfp4 g32",
        "w4g32 offset",
    ]
    assert len({*schemes}) == len(schemes) and WeightOnly(4, 128) != LowBit(4, 128, activation=token)
