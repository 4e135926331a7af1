"""Small floats: e2m1 (fp4) codes and e8m0 exponents, as the OCP microscaling specification (v1.0) defines them."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

# Magnitudes of codes 0 to 7; bit 3 is the sign.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FP4_MAX = E2M1[-1]


def decode_fp4(packed: Tensor, count: int) -> Tensor:
    """uint8 [..., ceil(count / 2)], low nibble first, to float32 [..., count]."""
    codes = torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)[..., :count]
    table = torch.tensor((*E2M1, *(-value for value in E2M1)), device=packed.device)
    return table[codes.long()]


def round_fp4(x: Tensor) -> Tensor:
    """The nearest e2m1 value of each element of x (float32), ties to the even code; beyond 6 it is 6."""
    middles = torch.tensor([(low + high) / 2 for low, high in pairwise(E2M1)], device=x.device)
    # Counting middles strictly below |x| sends a tie to the lower code; below an odd code the even one is the upper.
    bounds = middles.clone()
    bounds[1::2] = torch.nextafter(middles[1::2], torch.zeros_like(middles[1::2]))
    table = torch.tensor(E2M1, device=x.device)
    return torch.copysign(table[torch.bucketize(x.abs(), bounds)], x)


def decode_e8m0(exponents: Tensor) -> Tensor:
    """uint8 or float8_e8m0fnu exponents to float32 powers of two: ``2 ** (code - 127)``."""
    return exponents.view(torch.float8_e8m0fnu).float()
