"""Processor time of a tree of processes, and how much of some cores others took meanwhile."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


class OtherWork:
    """``with OtherWork(cores, pids) as work: ...`` and then ``work.share``, from 0 to 1.

    All that the kernel counted on ``cores``, time stolen by the host too, less the processor time of the processes that
    ``pids`` names when asked. The kernel counts in ticks of 10 ms, so a share over less than a second is coarse.
    """

    def __init__(self, cores: set[int], pids: Callable[[], list[int]]) -> None:
        self._cores, self._pids = cores, pids
        self.share = 0.0

    def __enter__(self) -> OtherWork:
        self._start = time.perf_counter()
        self._before = self._others()
        return self

    def __exit__(self, *_: object) -> None:
        seconds = time.perf_counter() - self._start
        self.share = max(0.0, self._others() - self._before) / (len(self._cores) * seconds)

    def _others(self) -> float:
        return busy_seconds(self._cores) - sum(processor_seconds(pid) for pid in self._pids())


def busy_seconds(cores: set[int]) -> float:
    """Seconds since boot that ``cores`` were not idle, or not there."""
    total = 0
    for line in Path("/proc/stat").read_text().splitlines():
        name, *ticks = line.split()
        if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in cores:
            user, nice, system, _idle, _wait, irq, softirq, steal = (int(word) for word in ticks[:8])
            total += user + nice + system + irq + softirq + steal
    return total / _TICKS


def processor_seconds(pid: int) -> float:
    """Of a process, its threads, and its children that have ended; 0 when it has ended itself."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(int(word) for word in fields[11:15]) / _TICKS


def process_tree(root: int) -> list[int]:
    """A process and all below it."""
    found, todo = [], [root]
    while todo:
        pid = todo.pop()
        found.append(pid)
        try:
            for task in os.listdir(f"/proc/{pid}/task"):
                todo += [int(child) for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split()]
        except OSError:
            continue
    return found
