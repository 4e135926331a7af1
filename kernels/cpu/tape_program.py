"""Replays of a recorded program: one call into C for all kernels of a step."""

from __future__ import annotations

import ctypes

from .library import functions


def run(address: int | None, names: list[str]) -> None:
    """The program at ``address``, whose calls are of the kernels ``names``. MemoryError where one found none."""
    _run(address, names, None)


def timed(address: int | None, names: list[str]) -> list[int]:
    """Run it, and the nanoseconds of each call."""
    times = (ctypes.c_int64 * len(names))()
    _run(address, names, times)
    return list(times)


def _run(address: int | None, names: list[str], times: ctypes.Array[ctypes.c_int64] | None) -> None:
    if failed := functions.twofold_tape_run(address, len(names), times):
        raise MemoryError(f"{names[failed - 1]} found no memory")
