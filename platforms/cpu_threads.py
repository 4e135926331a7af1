"""How many threads the compiled CPU kernels use and on which CPUs, which their library reads in place.

torch's setting is another: its OpenMP workers spin between operations, so a model that the compiled kernels carry does
better when torch, left with small operations, has one thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterable
from pathlib import Path

from ..errors import ConfigError
from ..log import get_logger

logger = get_logger(__name__)

# More threads than cores only hurt; this many times more are a slip of the hand.
MAX_THREADS_PER_CORE = 4

MAX_TEAM = 255
_OWN_THREADS = Path("/proc/self/task")

_cell = ctypes.c_int(0)
# How often the list was set, its length, the CPUs.
_team = (ctypes.c_int * (2 + MAX_TEAM))()
_rest: tuple[int, ...] = ()
_nodes: tuple[int, ...] = ()


def num_threads() -> int:
    """The thread count, the calling thread included; 0 while nobody has set it, and then the kernels use one."""
    return _cell.value


def set_num_threads(count: int) -> None:
    """Takes effect with the next kernel call."""
    _cell.value = count


def set_team_cpus(cpus: tuple[int, ...], rest: Iterable[int] = ()) -> None:
    """Tie the kernels' threads to these CPUs, one each, the caller's first; empty: to none. At their next call.

    ``rest`` is where all other threads of the program belong. Nobody is moved there, and the calling thread is left
    alone as well: see ``keep_thread_to``.
    """
    global _rest
    _rest = tuple(sorted(rest))
    if list(cpus) == _team[2 : 2 + _team[1]]:
        return
    _team[1] = min(len(cpus), MAX_TEAM)
    _team[2 : 2 + _team[1]] = list(cpus[:MAX_TEAM])
    _team[0] += 1


def team_cpus() -> tuple[int, ...]:
    """What ``set_team_cpus`` was given."""
    return tuple(_team[2 : 2 + _team[1]])


def rest_cpus() -> tuple[int, ...]:
    """Where threads belong that compute nothing; empty: anywhere."""
    return _rest


def leave_team() -> None:
    """Called first by a thread that a computing one starts: it inherits that one's CPU, and belongs elsewhere."""
    keep_thread_to(_rest)


def spread_over(nodes: tuple[int, ...]) -> None:
    """Have the pages of weights spread over these memory nodes from now on; empty: where they are first written."""
    global _nodes
    _nodes = nodes


def memory_nodes() -> tuple[int, ...]:
    """What ``spread_over`` was given."""
    return _nodes


def keep_thread_to(cpus: Iterable[int]) -> None:
    """Let the calling thread, and those that it starts, run on these CPUs alone; none given: as before."""
    wanted = set(cpus)
    if wanted and hasattr(os, "sched_setaffinity"):
        with contextlib.suppress(OSError):  # the container has changed since the plan was made
            os.sched_setaffinity(0, wanted)


def keep_process_to(cpus: Iterable[int]) -> None:
    """The same for every thread that this process has now."""
    wanted = set(cpus)
    if not wanted or not hasattr(os, "sched_setaffinity") or not _OWN_THREADS.is_dir():
        return
    for thread in _OWN_THREADS.iterdir():
        with contextlib.suppress(OSError):  # it has ended, or the container has changed
            os.sched_setaffinity(int(thread.name), wanted)


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


def team_address() -> int:
    """Address of the C ints that say where threads are tied: how often set, how many CPUs, the CPUs."""
    return ctypes.addressof(_team)
