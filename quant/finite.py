"""Whether all of a tensor is finite, in one pass and without temporaries, which ``isfinite`` has."""

from __future__ import annotations

from torch import Tensor


def is_finite(tensor: Tensor) -> bool:
    """No NaN and no infinity in a tensor of floats: both show in its least or its largest value."""
    if not tensor.numel():
        return True
    least, largest = tensor.aminmax()
    return bool(least.isfinite() & largest.isfinite())
