"""Trees like /sys/devices/system, as machines of several kinds have them."""

from __future__ import annotations

from pathlib import Path


def write_cpu(
    system: Path, number: int, *, siblings: str = "", package: int = 0, core: int | None = None, capacity: int = 0
) -> None:
    """One logical CPU; what is not given has no file."""
    topology = system / "cpu" / f"cpu{number}" / "topology"
    topology.mkdir(parents=True, exist_ok=True)
    (topology / "physical_package_id").write_text(f"{package}\n")
    if core is not None:
        (topology / "core_id").write_text(f"{core}\n")
    if siblings:
        (topology / "thread_siblings_list").write_text(f"{siblings}\n")
    if capacity:
        (topology.parent / "cpu_capacity").write_text(f"{capacity}\n")


def write_node(system: Path, number: int, cpus: str, free_kib: int) -> None:
    """One memory node."""
    node = system / "node" / f"node{number}"
    node.mkdir(parents=True, exist_ok=True)
    (node / "cpulist").write_text(f"{cpus}\n")
    (node / "meminfo").write_text(
        f"Node {number} MemTotal:       99999999 kB\nNode {number} MemFree:        {free_kib - 300} kB\n"
        f"Node {number} Inactive:       7777 kB\nNode {number} Inactive(file): 300 kB\n"
    )


def two_core_vm(system: Path) -> Path:
    """No hyperthreads, one node."""
    for cpu in range(2):
        write_cpu(system, cpu, siblings=str(cpu), core=cpu)
    write_node(system, 0, "0-1", 1000)
    return system


def two_sockets(system: Path) -> Path:
    """Two sockets of four cores with two hyperthreads each; core ids begin anew in the second; node 1 has more free."""
    for cpu in range(16):
        first = cpu % 8
        write_cpu(system, cpu, siblings=f"{first},{first + 8}", package=first // 4, core=first % 4)
    write_node(system, 0, "0-3,8-11", 1000)
    write_node(system, 1, "4-7,12-15", 5000)
    return system


def big_little(system: Path) -> Path:
    """An Arm chip of four slow, two middling and two fast cores, no node folder, core ids but no lists of siblings."""
    for cpu, capacity in enumerate([160] * 4 + [530] * 2 + [1024] * 2):
        write_cpu(system, cpu, core=cpu, capacity=capacity)
    return system
