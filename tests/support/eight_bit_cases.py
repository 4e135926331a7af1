"""Random int8 and fp8 weights of every kind of scale."""

from __future__ import annotations

import torch
from torch import Tensor
from twofold.quant.canonical import EightBitWeight
from twofold.quant.scheme import Activation, Element, Fp8, Int8, activation_of

_INT8, _FP8 = Activation(Element.INT8), Activation(Element.FP8)
_STATIC = Activation(Element.INT8, 0, dynamic=False)
_STATIC_ZERO = Activation(Element.INT8, 0, dynamic=False, symmetric=False)
_BLOCK8, _BLOCK48 = Activation(Element.FP8, 128), Activation(Element.FP8, 48)

EIGHT_BIT_SCHEMES = [
    Int8((1, -1), _INT8),
    Int8((-1, -1), _STATIC),
    Int8((1, -1), _STATIC_ZERO),
    Int8((1, -1), Activation(Element.INT8, symmetric=False)),
    Int8((1, -1), _STATIC_ZERO, symmetric=False),
    Int8((1, 32), Activation(Element.INT8, symmetric=False), symmetric=False),
    Int8((1, 32), _INT8),
    Int8((128, 128), Activation(Element.INT8, 128)),
    Int8((1, -1), Activation(Element.INT8, 0)),
    Fp8((-1, -1), Activation(Element.FP8, 0, dynamic=False)),
    Fp8((1, -1), _FP8),
    Fp8((128, 128), _BLOCK8),
    Fp8((48, 48), _BLOCK48),
    Fp8((128, 128), _FP8),
    Fp8((1, 32), Activation(Element.FP8, 32, power_of_two=True)),
    Fp8((1, -1)),
    Fp8((128, 128)),
]


def static_input(how: Activation | None) -> tuple[Tensor | None, Tensor | None]:
    """The float32 scalars (scale, zero) of a static activation."""
    if how is None or how.dynamic:
        return None, None
    return torch.tensor(0.05), None if how.symmetric else torch.tensor(-37.0)


def eight_bit_weight(scheme: Int8 | Fp8, outputs: int, features: int, seed: int = 0) -> EightBitWeight:
    """Codes over the whole range, scales of about the size that makes the values of order one."""
    random = torch.Generator().manual_seed(seed)
    shape = scheme.num_blocks((outputs, features))
    values = torch.randn(outputs, features, generator=random) * (50 if isinstance(scheme, Int8) else 100)
    limit = 127.0 if isinstance(scheme, Int8) else 448.0
    codes = values.clamp(-limit, limit).to(torch.int8 if isinstance(scheme, Int8) else torch.float8_e4m3fn)
    scales = (torch.rand(shape, generator=random) + 0.1) / limit
    zeros = None
    if isinstance(scheme, Int8) and not scheme.symmetric:
        zeros = torch.randint(-20, 20, shape, generator=random).to(torch.int8)
    return EightBitWeight(scheme, codes, scales, zeros, *static_input(activation_of(scheme)))
