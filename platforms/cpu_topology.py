"""Which logical CPUs share a core, and on which memory node each lies, as Linux tells under /sys/devices/system."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

SYSTEM = Path("/sys/devices/system")
_FREE = ("MemFree:", "Active(file):", "Inactive(file):")


@dataclass(frozen=True, slots=True)
class Core:
    """One physical core: the logical CPUs of it that this process may use, first to last, and its memory node.

    ``capacity`` is the kernel's figure for cores of several kinds (1024 the fastest); all alike have the same.
    """

    cpus: tuple[int, ...]
    node: int = 0
    capacity: int = 1024


@dataclass(frozen=True, slots=True)
class CpuTopology:
    """``cores`` in the order of their first CPUs. ``node_free``: bytes to be had, by the cores' nodes."""

    cores: tuple[Core, ...]
    node_free: Mapping[int, int]

    @property
    def cpus(self) -> frozenset[int]:
        """Every logical CPU of these cores."""
        return frozenset(cpu for core in self.cores for cpu in core.cpus)

    @property
    def nodes(self) -> tuple[int, ...]:
        """Memory nodes that these cores lie on."""
        return tuple(sorted({core.node for core in self.cores}))

    @property
    def fast_cores(self) -> tuple[Core, ...]:
        """Cores of at least half the capacity of the fastest: beside slow ones the fast would only wait."""
        fastest = max(core.capacity for core in self.cores)
        return tuple(core for core in self.cores if 2 * core.capacity >= fastest)

    def on_node(self, node: int) -> tuple[Core, ...]:
        """The fast cores of one node."""
        return tuple(core for core in self.fast_cores if core.node == node)


def read_topology(allowed: Iterable[int], system: Path = SYSTEM) -> CpuTopology:
    """The topology of the ``allowed`` logical CPUs. What is not told counts as cores of their own on one node."""
    node_of = _nodes(system / "node")
    groups: dict[object, list[int]] = {}
    for cpu in sorted(allowed):
        groups.setdefault(_core_key(system / "cpu" / f"cpu{cpu}", cpu), []).append(cpu)
    cores = tuple(
        Core(tuple(cpus), node_of.get(cpus[0], 0), _number(system / "cpu" / f"cpu{cpus[0]}" / "cpu_capacity") or 1024)
        for cpus in groups.values()
    )
    nodes = {core.node for core in cores}
    return CpuTopology(
        cores, {node: _free_bytes(system / "node" / f"node{node}" / "meminfo") for node in sorted(nodes)}
    )


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """``0-2,8`` as (0, 1, 2, 8); empty where it is no such list."""
    cpus: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if not first.isdigit() or (last and not last.isdigit()):
            return ()
        cpus += range(int(first), int(last or first) + 1)
    return tuple(cpus)


def _core_key(folder: Path, cpu: int) -> object:
    """What the logical CPUs of one core have in common."""
    topology = folder / "topology"
    for name in ("core_cpus_list", "thread_siblings_list"):
        siblings = parse_cpu_list(_text(topology / name))
        if cpu in siblings:
            return siblings
    core = _number(topology / "core_id")
    return cpu if core is None else (_number(topology / "physical_package_id"), core, "core")


def _nodes(folder: Path) -> dict[int, int]:
    """Logical CPU to memory node."""
    found: dict[int, int] = {}
    for node in sorted(folder.glob("node[0-9]*")):
        number = node.name.removeprefix("node")
        if number.isdigit():
            found |= dict.fromkeys(parse_cpu_list(_text(node / "cpulist")), int(number))
    return found


def _free_bytes(meminfo: Path) -> int:
    """What nobody uses and what only copies files."""
    rows = [line.split() for line in _text(meminfo).splitlines()]
    return sum(int(row[3]) * 1024 for row in rows if len(row) > 3 and row[2] in _FREE)


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.lstrip("-").isdigit() else None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
