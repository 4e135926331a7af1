"""Round to nearest, whatever the scheme."""

from __future__ import annotations

from torch import Tensor

from ..canonical import CanonicalWeight
from ..scheme import Fp8, Int8, Scheme, WeightOnly
from .eight_bit import quantize_eight_bit
from .rtn import quantize_rtn


def quantize_nearest(
    weight: Tensor, scheme: Scheme, importance: Tensor | None = None, *, clips: bool = True
) -> CanonicalWeight:
    """``weight`` [N, K] with the scales of least error (integers) or of the largest magnitudes (fp8).

    ``importance`` [K] weighs the errors of the columns, of integers in groups. Without ``clips`` these have grids over
    whole ranges.
    """
    if isinstance(scheme, Int8 | Fp8):
        return quantize_eight_bit(weight, scheme)
    assert isinstance(scheme, WeightOnly), f"{scheme} needs more than rounding"
    return quantize_rtn(weight, scheme, importance=importance, clips=clips)
