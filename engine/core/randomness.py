"""Random numbers that belong to a request: a hash of (seed, sample index, step), the same in any batch."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))
_TO_53_BITS = np.uint64(11)


def uniform(seed: NDArray[np.uint64], index: NDArray[np.uint64], step: NDArray[np.uint64]) -> NDArray[np.float64]:
    """One number in [0, 1) per row, with 53 random bits."""
    state = _mix(seed + _GOLDEN)
    state = _mix(state + (index + np.uint64(1)) * _GOLDEN)
    state = _mix(state + (step + np.uint64(1)) * _GOLDEN)
    return (state >> _TO_53_BITS) * 2.0**-53


def _mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's output function (Steele, Lea and Flood, 2014): every input bit reaches every output bit."""
    state = (state ^ (state >> _SHIFTS[0])) * _MULTIPLIERS[0]
    state = (state ^ (state >> _SHIFTS[1])) * _MULTIPLIERS[1]
    return state ^ (state >> _SHIFTS[2])
