"""The range of keys and values, as a KV cache would get them, while calibration windows pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...platforms.fp8 import fp8_max

LIMITS = {"fp8": fp8_max(torch.float8_e4m3fn), "int8": 127.0}


class KVRanges:
    """Stands for transformers' cache: passes keys and values on and keeps their largest magnitudes."""

    def __init__(self) -> None:
        self.largest = torch.zeros(2)

    def update(self, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """What attention calls with the keys (positions applied) and values of its tokens."""
        self.largest = torch.maximum(self.largest, torch.stack([key.abs().max(), value.abs().max()]).float().cpu())
        return key, value

    def get_seq_length(self, *_: Any, **__: Any) -> int:
        """Nothing is kept."""
        return 0

    def scales(self, dtype: str) -> Tensor:
        """float32 [2], of keys and of values, for a cache of ``dtype``; 1 where nothing but zeros came."""
        return torch.where(self.largest > 0, self.largest / LIMITS[dtype], torch.ones(2))
