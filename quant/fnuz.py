"""e4m3fn weights on chips whose 8-bit float is e4m3fnuz (gfx940 to gfx942).

The same bits mean half as much there: the exponent's bias is 8 instead of 7. So the bits stay and the scale doubles.
Two kinds of codes differ: 0x80 is minus zero in e4m3fn and NaN in e4m3fnuz; 0x7F and 0xFF are NaN in e4m3fn and +-240
in e4m3fnuz.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..errors import CheckpointError
from .eight_bit import EightBitWeight
from .scheme import Fp8

_NEGATIVE_ZERO = 0x80
_NAN = 0x7F


def to_fnuz(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """float8_e4m3fn codes to float8_e4m3fnuz ones, and scales for them: ``code * scale`` stays exactly the same.

    CheckpointError when a code is NaN.
    """
    bits = codes.view(torch.uint8)
    num_nan = int(((bits & 0x7F) == _NAN).sum())
    if num_nan:
        raise CheckpointError(f"{num_nan} of {bits.numel()} fp8 weights are NaN; the checkpoint is damaged")
    cleared = torch.where(bits == _NEGATIVE_ZERO, torch.zeros_like(bits), bits)
    return cleared.view(torch.float8_e4m3fnuz), scales * 2


def weight_to_fnuz(weight: EightBitWeight) -> EightBitWeight:
    """An fp8 weight for an fnuz chip; a static input scale doubles as well."""
    assert isinstance(weight.scheme, Fp8), f"{weight.scheme} is not fp8"
    codes, scales = to_fnuz(weight.codes, weight.scales)
    return replace(
        weight,
        codes=codes,
        scales=scales,
        input_scale=None if weight.input_scale is None else weight.input_scale * 2,
    )
