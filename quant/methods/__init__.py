"""Methods that make quantized weights, by the name a user gives."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ..canonical import PackedWeight
from ..scheme import WeightOnly
from .rtn import quantize_rtn

# Weight [N, K] and the scheme wanted, to a packed weight.
WEIGHT_METHODS: dict[str, Callable[[Tensor, WeightOnly], PackedWeight]] = {"rtn": quantize_rtn}
