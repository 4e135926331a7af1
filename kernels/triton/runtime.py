"""What a launcher asks about the device of its tensors."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch

from ...platforms import current_platform
from ...platforms.spec import DeviceSpec

__all__ = ["assume_device", "device_arch", "num_cores"]

# What CPU tensors stand for in triton's interpreter: (architecture, cores).
_assumed = ("", 4)


@contextlib.contextmanager
def assume_device(arch: str, cores: int) -> Iterator[None]:
    """Within it, kernels on CPU tensors are launched as on such a device."""
    global _assumed
    previous, _assumed = _assumed, (arch, cores)
    try:
        yield
    finally:
        _assumed = previous


def device_arch(device: torch.device) -> str:
    """``sm_90``, ``gfx942`` and so on, the key into the launch table; "" for CPU tensors (the interpreter)."""
    return _assumed[0] if device.type == "cpu" else _gpu().arch


def num_cores(device: torch.device) -> int:
    """Streaming multiprocessors or compute units, which a grid should fill."""
    return _assumed[1] if device.type == "cpu" else _gpu().num_cores


@functools.cache
def _gpu() -> DeviceSpec:
    return current_platform().spec
