"""Weights of integers for products with inputs in 8 bits, and the product by its definition."""

from __future__ import annotations

import torch
from torch import Tensor
from twofold.kernels.reference import fake_quantize
from twofold.quant.canonical import CanonicalWeight, EightBitWeight, PackedWeight, dequantize, pack
from twofold.quant.scheme import Activation, Element, Int8, LowBit, Offset, WeightOnly

PER_32 = Activation(Element.INT8, 32)


def integer_weight(
    scheme: WeightOnly | Offset | LowBit,
    shape: tuple[int, int],
    static: Tensor | None = None,
    *,
    scale_dtype: torch.dtype = torch.float32,
) -> PackedWeight:
    """Random codes, scales of both signs, zeros or offsets."""
    generator = torch.Generator().manual_seed(scheme.bits * 1000 + shape[0])
    (rows, columns), groups = shape, scheme.num_groups(shape[1])
    scales, zeros = torch.randn(rows, groups, generator=generator).to(scale_dtype), None
    if isinstance(scheme, Offset):
        zeros = torch.randn(rows, groups, generator=generator).to(scale_dtype)
    elif not scheme.symmetric:
        zeros = torch.randint(0, 2**scheme.bits, (rows, groups), generator=generator).to(torch.uint8)
    perm = torch.randperm(columns, generator=generator).to(torch.int32) if scheme.act_order else None
    codes = torch.randint(0, 2**scheme.bits, shape, generator=generator)
    return PackedWeight(scheme, shape, pack(codes, scheme.bits), scales, zeros, perm, static)


def eight_bit_weight(scheme: Int8, shape: tuple[int, int], static: Tensor | None = None) -> EightBitWeight:
    """All of int8's values, zeros where the scheme has them."""
    generator = torch.Generator().manual_seed(shape[0])
    scales = torch.rand(scheme.num_blocks(shape), generator=generator) + 0.5
    zeros = None if scheme.symmetric else torch.randint(-128, 128, scales.shape, generator=generator).to(torch.int8)
    codes = torch.randint(-128, 128, shape, generator=generator).to(torch.int8)
    return EightBitWeight(scheme, codes, scales, zeros, static if not scheme.activation.dynamic else None)


def expected_product(x: Tensor, weight: CanonicalWeight, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The product in float64, and the sums of its terms' magnitudes. Act-order: inputs are grouped as packed."""
    assert isinstance(weight, EightBitWeight | PackedWeight)
    how = weight.scheme.activation if isinstance(weight.scheme, Int8 | LowBit) else PER_32
    matrix = dequantize(weight).double()
    if isinstance(weight, PackedWeight) and weight.perm is not None:
        x, matrix = x[:, weight.perm.long()], matrix[:, weight.perm.long()]
    rounded = fake_quantize(x, how, weight.input_scale).double()
    size = rounded.abs() @ matrix.abs().T
    if isinstance(weight.scheme, Offset):  # which is a term of its own, often of the other sign
        size += rounded.abs() @ (2**weight.scheme.bits * weight.scales.abs().amax(1).double().expand_as(matrix.T).T).T
    product = rounded @ matrix.T
    return (product, size) if bias is None else (product + bias, size + bias.abs())
