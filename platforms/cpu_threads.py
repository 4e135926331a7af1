"""How many threads the compiled CPU kernels use: one number for the process, which their library reads in place.

torch's setting is another: its OpenMP workers spin between operations, so a model that the compiled kernels carry does
better when torch, left with small operations, has one thread.
"""

from __future__ import annotations

import ctypes

from ..errors import ConfigError
from ..log import get_logger

logger = get_logger(__name__)

# More threads than cores only hurt; this many times more are a slip of the hand.
MAX_THREADS_PER_CORE = 4

_cell = ctypes.c_int(0)


def num_threads() -> int:
    """The thread count, the calling thread included; 0 while nobody has set it, and then the kernels use one."""
    return _cell.value


def set_num_threads(count: int) -> None:
    """Takes effect with the next kernel call."""
    _cell.value = count


def check_num_threads(count: int | None, num_cores: int) -> None:
    """Warn about more threads than cores that this process may use; ConfigError from ``MAX_THREADS_PER_CORE`` up."""
    if count is None or count <= num_cores:
        return
    if count > MAX_THREADS_PER_CORE * num_cores:
        raise ConfigError(
            f"num_threads is {count}; this process may use {num_cores} cores, and {MAX_THREADS_PER_CORE} threads "
            f"a core ({MAX_THREADS_PER_CORE * num_cores}) are the limit; leave it out to take one a core"
        )
    logger.warning(
        "num_threads is %d, more than the %d cores that this process may use: that is slower", count, num_cores
    )


def cell_address() -> int:
    """Address of the C int that holds the number, for the process's whole life."""
    return ctypes.addressof(_cell)
