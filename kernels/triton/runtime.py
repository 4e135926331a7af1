"""What a launcher asks about the device of its tensors."""

from __future__ import annotations

import functools

import torch

from ...platforms import current_platform

__all__ = ["device_arch", "num_cores"]


@functools.cache
def device_arch(device: torch.device) -> str:
    """``sm_90``, ``gfx942`` and so on, the key into the launch table; "" for CPU tensors (the interpreter)."""
    return "" if device.type == "cpu" else current_platform().spec.arch


@functools.cache
def num_cores(device: torch.device) -> int:
    """Streaming multiprocessors or compute units, which a grid should fill."""
    return 4 if device.type == "cpu" else current_platform().spec.num_cores
