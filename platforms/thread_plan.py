"""ThreadPlan: how many threads compute, on which CPUs, and which CPUs are for the rest of the program.

A thread that is tied to a CPU cannot flee from a process that comes to work there. So threads are tied only where the
rest of the server has CPUs of its own, where no quota makes the CPUs a pool of time, and where all cores are taken: two
servers of a few threads each would choose the same ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .cpu_topology import Core, CpuTopology


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadPlan:
    """``team``: the CPU of each computing thread, the caller's first; empty: none is tied, for the reason ``free``.

    ``rest``: CPUs for everything else (empty: any). ``home``: CPUs of the memory node that threads which are not tied
    keep to (empty: any). ``nodes``: memory nodes over which weights are spread (empty: they lie where they are first
    written). ``num_cores`` is what this process may use.
    """

    num_threads: int
    num_cores: int
    team: tuple[int, ...] = ()
    rest: frozenset[int] = frozenset()
    home: frozenset[int] = frozenset()
    nodes: tuple[int, ...] = ()
    free: str = ""

    def __str__(self) -> str:
        if self.team:
            where = f"tied to CPUs {_ranges(self.team)}, the rest of the server to {_ranges(self.rest)}"
        else:
            kept = f", but kept to {_ranges(self.home)}" if self.home else ""
            where = f"not tied to CPUs{kept}: {self.free}"
        spread = f"; weights spread over memory nodes {_ranges(self.nodes)}" if self.nodes else ""
        return where + spread


def usable_cores(topology: CpuTopology, quota: float | None) -> int:
    """Cores that are worth a thread: fast ones, at most the quota rounded up."""
    cores = len(topology.fast_cores)
    return cores if quota is None else max(1, min(cores, math.ceil(quota)))


def plan_threads(
    topology: CpuTopology, quota: float | None, num_threads: int | None = None, pin: str = "auto"
) -> ThreadPlan:
    """Plan for ``num_threads`` (None: one for each usable core) under a ``quota`` of CPUs' worth of time.

    ``pin``: ``on`` ties threads wherever there are cores for them, ``off`` never does. A team that fits on one memory
    node stays on the one with most free memory.
    """
    num_cores = usable_cores(topology, quota)
    count = num_threads or num_cores
    cores = _choose(topology, count)
    rest = topology.cpus - {core.cpus[0] for core in cores}
    used = tuple(sorted({core.node for core in cores}))
    free = _why_free(topology, quota, count, rest, pin)
    if not free:
        team = tuple(core.cpus[0] for core in cores)
        nodes = used if len(used) > 1 else ()
        return ThreadPlan(num_threads=count, num_cores=num_cores, team=team, rest=rest or topology.cpus, nodes=nodes)
    several = len(topology.nodes) > 1
    home = frozenset[int]()
    if several and len(used) == 1 and count <= len(cores) and pin != "off":
        home = frozenset(cpu for core in topology.cores if core.node == used[0] for cpu in core.cpus)
    nodes = topology.nodes if several and not home else ()
    return ThreadPlan(num_threads=count, num_cores=num_cores, home=home, nodes=nodes, free=free)


def _choose(topology: CpuTopology, count: int) -> tuple[Core, ...]:
    """The cores of a team: of the node with most free memory that has enough, else of as few nodes as possible."""
    by_memory = sorted(topology.nodes, key=lambda node: (-topology.node_free.get(node, 0), node))
    for node in by_memory:
        if len(topology.on_node(node)) >= count:
            return topology.on_node(node)[:count]
    by_cores = sorted(by_memory, key=lambda node: -len(topology.on_node(node)))
    return tuple(core for node in by_cores for core in topology.on_node(node))[:count]


def _why_free(topology: CpuTopology, quota: float | None, count: int, rest: frozenset[int], pin: str) -> str:
    """Why threads are not tied, in words; empty: they are."""
    if pin == "off":
        return "TWOFOLD_CPU_PIN is off"
    if count > len(topology.fast_cores):
        return f"more threads than the {len(topology.fast_cores)} cores"
    if pin == "on":
        return ""
    if quota is not None and quota < len(topology.cpus):
        return f"the container grants {quota:g} of {len(topology.cpus)} CPUs' time"
    if count < len(topology.fast_cores):
        return f"they are fewer than the {len(topology.fast_cores)} cores, which others may use as well"
    if not rest:
        return "they use every CPU, and the server must run as well"
    return ""


def _ranges(numbers: tuple[int, ...] | frozenset[int]) -> str:
    """(0, 1, 2, 8) as ``0-2,8``."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][-1] == number - 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ",".join("-".join(map(str, run)) for run in runs)
