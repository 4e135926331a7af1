"""Which platform this process uses: torch's own build decides, never a vendor's monitoring library."""

from __future__ import annotations

import functools
from pathlib import Path

import torch

from ..errors import ConfigError, UnsupportedError
from ..log import get_logger
from .cpu import CpuPlatform
from .cuda import CudaPlatform
from .interface import Platform
from .rocm import RocmPlatform

logger = get_logger(__name__)

_DEVICE_FILES = {"rocm": Path("/dev/kfd"), "cuda": Path("/dev/nvidiactl")}
_VENDORS = {"rocm": "AMD", "cuda": "NVIDIA"}
_WHEELS = {
    "rocm": "install torch's ROCm build in place of this one, as PyTorch's install page shows",
    "cuda": "install torch's CUDA build in place of this one, as PyTorch's install page shows",
}


def select_platform(device: str = "auto") -> Platform:
    """The platform for ``auto``, ``cpu``, ``cuda`` or ``rocm``.

    ``auto`` takes the GPU that torch can drive, else the CPU, with a warning when a GPU is there that this torch cannot
    drive. Asking for a GPU by name raises UnsupportedError with the same text when it cannot be had.
    """
    if device == "cpu":
        return CpuPlatform()
    if device in ("cuda", "rocm"):
        reason = _why_not(device)
        if reason is not None:
            raise UnsupportedError(f"--device {device}: {reason}")
        return _gpu(device)
    if device != "auto":
        raise ConfigError(f"device is {device!r}; it must be one of auto, cpu, cuda, rocm")
    for kind in ("rocm", "cuda"):
        reason = _why_not(kind)
        if reason is None:
            return _gpu(kind)
        if _device_present(kind):
            logger.warning("using the CPU although there is an %s device: %s", _VENDORS[kind], reason)
    return CpuPlatform()


@functools.cache
def current_platform() -> Platform:
    """The platform that ``auto`` selects, chosen once per process."""
    return select_platform("auto")


def _gpu(kind: str) -> Platform:
    return RocmPlatform() if kind == "rocm" else CudaPlatform()


def _why_not(kind: str) -> str | None:
    """None when torch can drive a GPU of that kind, else the reason and the remedy in one sentence."""
    built_for = "rocm" if torch.version.hip else "cuda" if torch.version.cuda else "cpu"
    if built_for != kind:
        build = {"rocm": "a ROCm", "cuda": "a CUDA", "cpu": "a CPU-only"}[built_for]
        return f"the installed torch {torch.__version__} is {build} build; {_WHEELS[kind]}"
    try:
        available = torch.cuda.is_available()
    except Exception as error:  # a broken driver raises all sorts of things here
        return f"torch cannot start the {_VENDORS[kind]} driver ({error}); check the driver's installation"
    if not available:
        device_file = _DEVICE_FILES[kind]
        return (
            f"torch finds no usable {_VENDORS[kind]} GPU; check the driver and that this process may use {device_file}"
        )
    return None


def _device_present(kind: str) -> bool:
    return _DEVICE_FILES[kind].exists()
