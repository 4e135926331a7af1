"""The CPU platform: this machine's processor and memory, within the container's limits."""

from __future__ import annotations

import functools
import os
import resource
from pathlib import Path

import torch

from .. import env
from . import cpu_threads
from .cgroup import cpu_quota, memory_limit
from .cpu_info import allowed_cpus, cpu_info
from .cpu_topology import CpuTopology, read_topology
from .graphs import GraphRecorder
from .interface import MemoryInfo, Platform
from .spec import DeviceSpec
from .thread_plan import ThreadPlan, plan_threads

_MEMINFO = Path("/proc/meminfo")
_STATM = Path("/proc/self/statm")
# Of a limited address space: stacks, the C library's arenas and the steps' area take places that never become memory.
_UNUSED_ADDRESSES = 768 << 20


class CpuPlatform(Platform):
    """The host's processor; memory and cores are what the container leaves."""

    def __init__(self) -> None:
        info = cpu_info()
        self._plan = thread_plan()
        self.device = torch.device("cpu")
        self.spec = DeviceSpec(
            vendor="cpu",
            arch=info.arch,
            name=info.name,
            device_type="cpu",
            wave_size=1,
            shared_memory_per_block=0,
            num_cores=self._plan.num_cores,
            matrix_dtypes=_matrix_dtypes(info.features),
            memory_bytes=self.memory().total,
        )
        if not cpu_threads.num_threads():
            cpu_threads.set_num_threads(self.spec.num_cores)

    def preferred_dtype(self, checkpoint_dtype: torch.dtype) -> torch.dtype:
        return torch.float32

    def memory(self) -> MemoryInfo:
        total, free = host_memory()
        free = min(free, free_addresses())
        limit = memory_limit()
        if limit is None:
            return MemoryInfo(total, free)
        return MemoryInfo(min(total, limit.limit), max(0, min(free, limit.limit - limit.usage)))

    def synchronize(self) -> None:
        """Nothing to wait for: CPU work is done when its call returns."""

    def set_threads(self, num_threads: int | None, *, torch_too: bool = True) -> None:
        self._plan = plan = thread_plan(num_threads)
        cpu_threads.set_num_threads(plan.num_threads)
        cpu_threads.spread_over(plan.nodes)
        cpu_threads.keep_thread_to(plan.home)
        # torch's workers would inherit the CPU of the thread that starts them.
        cpu_threads.set_team_cpus(*(((), ()) if torch_too else (plan.team, plan.rest)))
        torch.set_num_threads(plan.num_threads if torch_too else 1)

    def graphs(self) -> GraphRecorder | str:
        # The compiled kernels' own: platforms know of kernels here alone, and only once they are asked.
        from ..kernels.cpu.library import unavailable
        from ..kernels.cpu.tape import TapeRecorder

        return unavailable() or TapeRecorder()

    def describe(self) -> dict[str, str]:
        return super().describe() | {
            "topology": describe_topology(topology()),
            "threads": str(cpu_threads.num_threads()),
            "placement": str(self._plan),
        }


@functools.cache
def topology() -> CpuTopology:
    """The processors that this process might use when it first asked: later it may have tied itself down."""
    return read_topology(allowed_cpus())


def thread_plan(num_threads: int | None = None) -> ThreadPlan:
    """The plan for this machine, its container and ``TWOFOLD_CPU_PIN``."""
    return plan_threads(topology(), cpu_quota(), num_threads, env.cpu_pin())


def usable_cores() -> int:
    """Physical cores among the allowed processors, at most the container's quota."""
    return thread_plan().num_cores


def describe_topology(found: CpuTopology) -> str:
    """In one line: cores, logical CPUs, memory nodes."""
    nodes = [f"{free / (1 << 30):.1f} GiB free on node {node}" for node, free in found.node_free.items()]
    quota = cpu_quota()
    granted = "" if quota is None else f", time of {quota:g} granted"
    return f"{len(found.cores)} cores with {len(found.cpus)} CPUs{granted}; {', '.join(nodes)}"


def host_memory(meminfo: Path = _MEMINFO) -> tuple[int, int]:
    """(total, available) bytes of the machine."""
    if meminfo.exists():
        rows = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        total, available = (int(rows[key].split()[0]) * 1024 for key in ("MemTotal", "MemAvailable"))
        return total, available
    page = os.sysconf("SC_PAGE_SIZE")
    total = os.sysconf("SC_PHYS_PAGES") * page
    return total, total // 2


def free_addresses(statm: Path = _STATM) -> int:
    """Bytes that a limit of this process's address space (``ulimit -v``) leaves for memory; without one, no bound."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY or not statm.exists():
        return 1 << 62
    taken = int(statm.read_text().split()[0]) * resource.getpagesize()
    return max(0, limit - taken - _UNUSED_ADDRESSES)


def _matrix_dtypes(features: frozenset[str]) -> frozenset[str]:
    found = set()
    if features & {"amx_int8", "i8mm"}:
        found.add("int8")
    if features & {"amx_bf16", "bf16"}:
        found.add("bf16")
    if "amx_fp16" in features:
        found.add("f16")
    return frozenset(found)
