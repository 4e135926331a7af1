"""What this machine is: device facts, memory, threads.

The names below are loaded on first use: a spec alone needs no torch, and importing never initializes a GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .spec import DeviceSpec, Fp8Kind

if TYPE_CHECKING:
    from .interface import MemoryInfo, Platform
    from .select import current_platform, select_platform

__all__ = ["DeviceSpec", "Fp8Kind", "MemoryInfo", "Platform", "current_platform", "select_platform"]


def __getattr__(name: str) -> Any:
    if name in ("select_platform", "current_platform"):
        from . import select

        return getattr(select, name)
    if name in ("Platform", "MemoryInfo"):
        from . import interface

        return getattr(interface, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
