"""The canonical layout: what it stands for, and when weights share a matrix."""

from __future__ import annotations

import pytest
import torch
from twofold.quant.canonical import DenseWeight, PackedWeight, dequantize, merge, pack
from twofold.quant.scheme import Dense, WeightOnly


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
