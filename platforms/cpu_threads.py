"""How many threads the compiled CPU kernels use: one number for the process, which their library reads in place.

torch's setting is another: its OpenMP workers spin between operations, so a model that the compiled kernels carry does
better when torch, left with small operations, has one thread.
"""

from __future__ import annotations

import ctypes

_cell = ctypes.c_int(0)


def num_threads() -> int:
    """The thread count, the calling thread included; 0 while nobody has set it, and then the kernels use one."""
    return _cell.value


def set_num_threads(count: int) -> None:
    """Takes effect with the next kernel call."""
    _cell.value = count


def cell_address() -> int:
    """Address of the C int that holds the number, for the process's whole life."""
    return ctypes.addressof(_cell)
