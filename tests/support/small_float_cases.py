"""Weights of fp8 and fp4 in every scheme that the CPU's kernels keep in their bits."""

from __future__ import annotations

import torch
from torch import Tensor
from twofold.quant.canonical import CanonicalWeight, EightBitWeight, MicroScaledWeight
from twofold.quant.scheme import Activation, Element, Fp8, MicroScaled

TOKEN = Activation(Element.FP8)
# And how scales are stored.
SCHEMES = [
    (Fp8((-1, -1)), torch.float32),
    (Fp8((1, -1), TOKEN), torch.bfloat16),
    (Fp8((16, 32), Activation(Element.FP8, 32)), torch.float32),
    (Fp8((128, 128), Activation(Element.FP8, 128)), torch.float16),
    (MicroScaled(Element.FP8, 32, True, Activation(Element.FP8, 32, power_of_two=True)), torch.uint8),
    (MicroScaled(Element.FP4, 32, True), torch.uint8),
    (MicroScaled(Element.FP4, 16, False), torch.float8_e4m3fn),
]


def codes(rows: int, columns: int, random: torch.Generator) -> Tensor:
    """Every code that is a number."""
    drawn = torch.randint(0, 256, (rows, columns), generator=random, dtype=torch.uint8)
    return torch.where((drawn & 0x7F) == 0x7F, drawn - 1, drawn)


def weight_of(scheme: Fp8 | MicroScaled, scales: torch.dtype, shape: tuple[int, int], seed: int = 0) -> CanonicalWeight:
    """Random codes and scales; every code is a number."""
    random = torch.Generator().manual_seed(seed)
    rows, columns = shape
    if isinstance(scheme, Fp8):
        values = torch.rand(scheme.num_blocks(shape), generator=random) * 0.01
        return EightBitWeight(scheme, codes(rows, columns, random).view(torch.float8_e4m3fn), values.to(scales))
    groups = -(-columns // scheme.group_size)
    if scheme.power_of_two:
        steps = torch.randint(100, 140, (rows, groups), generator=random, dtype=torch.uint8)
    else:
        steps = torch.rand(rows, groups, generator=random).to(scales)
    if scheme.element is Element.FP8:
        return MicroScaledWeight(scheme, shape, codes(rows, columns, random).view(torch.float8_e4m3fn), steps)
    packed = torch.randint(0, 256, (rows, -(-columns // 2)), generator=random, dtype=torch.uint8)
    return MicroScaledWeight(scheme, shape, packed, steps, None if scheme.power_of_two else torch.tensor([[17.0]]))
