"""How far a kernel may be from a float64 calculation of the same inputs."""

from __future__ import annotations

import torch
from torch import Tensor

# Unit roundoff of the result's dtype, and a little for the float32 arithmetic in between.
ROUNDOFF = {torch.float32: 2.0**-20, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


def assert_near(actual: Tensor, expected: Tensor, *, scale: float = 1.0, factor: float = 2.0) -> None:
    """``|actual - expected| <= factor * roundoff * (|expected| + scale)`` everywhere; ``scale`` is the terms'
    magnitude."""
    assert actual.shape == expected.shape, f"{tuple(actual.shape)} is not {tuple(expected.shape)}"
    assert torch.isfinite(actual).all(), "the result has nan or infinity"
    wanted = expected.double()
    limit = factor * ROUNDOFF[actual.dtype] * (wanted.abs() + scale)
    excess = ((actual.double() - wanted).abs() / limit).max().item() if actual.numel() else 0.0
    assert excess <= 1.0, f"off by {excess:.2f} times the tolerance"
