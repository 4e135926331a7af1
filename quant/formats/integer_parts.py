"""What writers of integer formats share: codes and zeros of a `PackedWeight`, and whether groups fit."""

from __future__ import annotations

import torch
from torch import Tensor

from ..canonical import CanonicalWeight, PackedWeight
from ..packing import unpack
from ..scheme import WeightOnly

SCALE_DTYPE = torch.float16


def packed(weight: CanonicalWeight) -> PackedWeight:
    """``weight``, which must hold integers."""
    assert isinstance(weight, PackedWeight), f"{weight.scheme} has no integer codes"
    return weight


def all_zeros(weight: PackedWeight) -> Tensor:
    """Zeros [N, G] uint8, spelled out where all are the middle one."""
    middle = 2 ** (weight.scheme.bits - 1)
    return torch.full_like(weight.scales, middle, dtype=torch.uint8) if weight.zeros is None else weight.zeros


def codes_in_order(weight: PackedWeight) -> Tensor:
    """Codes uint8 [N, K], columns in the order of the input features."""
    codes = unpack(weight.qweight, weight.scheme.bits, weight.shape[1])
    return codes if weight.perm is None else codes[:, weight.perm.long().argsort()]


def group_misfit(columns: int, scheme: WeightOnly) -> str | None:
    """Why groups do not divide K."""
    if scheme.group_size == -1 or columns % scheme.group_size == 0:
        return None
    return f"{columns} input features are not divisible by the group size {scheme.group_size}"
