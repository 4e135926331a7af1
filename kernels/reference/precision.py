"""The precision that definitions compute in."""

from __future__ import annotations

import torch
from torch import Tensor


def wide(x: Tensor) -> Tensor:
    """x in float32, or as it is where it is float64."""
    return x if x.dtype is torch.float64 else x.float()
