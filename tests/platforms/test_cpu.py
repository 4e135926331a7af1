"""Facts about the host: instruction sets, cores, and what a container leaves of memory and CPU time."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch
from twofold.platforms import cgroup, cpu, cpu_threads
from twofold.platforms.cpu_info import parse_cpuinfo, x86_level

V2 = "cx16 lahf_lm popcnt sse4_1 sse4_2 ssse3"
V3 = f"{V2} avx avx2 bmi1 bmi2 f16c fma abm movbe"
V4 = f"{V3} avx512f avx512bw avx512cd avx512dq avx512vl"

X86 = """processor\t: 0
model name\t: Good Chip 9000
physical id\t: 0
core id\t\t: 0
flags\t\t: {flags}

processor\t: 1
model name\t: Good Chip 9000
physical id\t: 0
core id\t\t: 0
flags\t\t: {flags}

processor\t: 2
physical id\t: 0
core id\t\t: 1
flags\t\t: {flags}
"""
ARM = """processor\t: 0
BogoMIPS\t: 243.75
Features\t: fp asimd asimddp i8mm bf16

processor\t: 1
Features\t: fp asimd asimddp i8mm bf16
"""


@pytest.mark.parametrize(("flags", "level"), [("sse", 1), (V2, 2), (V3, 3), (V4, 4), (V4.replace("fma", ""), 2)])
def test_x86_levels(flags, level):
    assert x86_level(frozenset(flags.split())) == level
    assert parse_cpuinfo(X86.format(flags=flags), "x86_64").arch == f"x86-64-v{level}"


def test_names_and_features():
    assert parse_cpuinfo(X86.format(flags=V3), "x86_64").name == "Good Chip 9000"
    arm = parse_cpuinfo(ARM, "aarch64")
    assert arm.arch == "aarch64" and "i8mm" in arm.features
    unknown = parse_cpuinfo("", "riscv64")
    assert (unknown.name, unknown.arch, unknown.features) == ("riscv64", "riscv64", frozenset())


def test_fingerprint_follows_the_features():
    one, other = (parse_cpuinfo(X86.format(flags=flags), "x86_64") for flags in (V3, V4))
    assert one.fingerprint() != other.fingerprint()


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_cgroup_v2_takes_the_tightest_ancestor(tmp_path):
    root, process = tmp_path / "fs", tmp_path / "cgroup"
    process.write_text("0::/pod/container\n")
    write(
        root,
        {
            "cgroup.controllers": "cpu memory",
            "pod/memory.max": "4000\n",
            "pod/memory.current": "3500\n",
            "pod/memory.stat": "anon 5\ninactive_file 500\n",
            "pod/container/memory.max": "9000\n",
            "pod/container/memory.current": "100\n",
            "pod/cpu.max": "max 100000\n",
            "pod/container/cpu.max": "150000 100000\n",
        },
    )
    assert cgroup.memory_limit(root, process) == cgroup.CgroupMemory(4000, 3000)
    assert cgroup.cpu_quota(root, process) == 1.5


def test_cgroup_v1_and_no_limit(tmp_path):
    root, process = tmp_path / "fs", tmp_path / "cgroup"
    process.write_text("9:memory:/box\n4:cpu,cpuacct:/box\n0::/\n")
    write(
        root,
        {
            "memory/memory.limit_in_bytes": "9223372036854771712\n",
            "memory/box/memory.limit_in_bytes": "2000\n",
            "memory/box/memory.usage_in_bytes": "900\n",
            "memory/box/memory.stat": "total_inactive_file 400\n",
            "cpu,cpuacct/box/cpu.cfs_quota_us": "50000\n",
            "cpu,cpuacct/box/cpu.cfs_period_us": "100000\n",
        },
    )
    assert cgroup.memory_limit(root, process) == cgroup.CgroupMemory(2000, 500)
    assert cgroup.cpu_quota(root, process) == 0.5
    (root / "memory/box/memory.limit_in_bytes").write_text("9223372036854771712\n")
    (root / "cpu,cpuacct/box/cpu.cfs_quota_us").write_text("-1\n")
    assert cgroup.memory_limit(root, process) is None
    assert cgroup.cpu_quota(root, process) is None
    assert cgroup.memory_limit(tmp_path / "nothing", tmp_path / "neither") is None


def test_a_limit_of_the_address_space_counts(tmp_path, monkeypatch):
    statm = tmp_path / "statm"
    statm.write_text("1000 20 3\n")
    page, unused = resource.getpagesize(), cpu._UNUSED_ADDRESSES
    limits = {"soft": 1000 * page + unused + 5000}
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limits["soft"], resource.RLIM_INFINITY))
    assert cpu.free_addresses(statm) == 5000
    limits["soft"] = 10 * page
    assert cpu.free_addresses(statm) == 0
    limits["soft"] = resource.RLIM_INFINITY
    assert cpu.free_addresses(statm) > 1 << 60
    monkeypatch.setattr(cpu, "host_memory", lambda: (10**12, 10**12))
    monkeypatch.setattr(cpu, "memory_limit", lambda: None)
    monkeypatch.setattr(cpu, "free_addresses", lambda: 5000)
    assert cpu.CpuPlatform().memory().free == 5000


def test_free_memory_is_what_the_container_leaves(monkeypatch):
    monkeypatch.setattr(cpu, "host_memory", lambda: (10_000, 6_000))
    monkeypatch.setattr(cpu, "memory_limit", lambda: cgroup.CgroupMemory(8_000, 7_500))
    memory = cpu.CpuPlatform().memory()
    assert (memory.total, memory.free) == (8_000, 500)
    monkeypatch.setattr(cpu, "memory_limit", lambda: cgroup.CgroupMemory(8_000, 9_000))
    assert cpu.CpuPlatform().memory().free == 0
    monkeypatch.setattr(cpu, "memory_limit", lambda: None)
    assert cpu.CpuPlatform().memory().free == 6_000


def test_threads_follow_the_quota(monkeypatch):
    monkeypatch.setattr(cpu, "cpu_quota", lambda: 1)
    platform = cpu.CpuPlatform()
    threads, kernel_threads = torch.get_num_threads(), cpu_threads.num_threads()
    try:
        platform.set_threads(None)
        assert torch.get_num_threads() == 1
        platform.set_threads(3)
        assert torch.get_num_threads() == 3
        assert platform.describe()["threads"] == "3"
        platform.set_threads(3, torch_too=False)
        assert (torch.get_num_threads(), platform.describe()["threads"]) == (1, "3")
    finally:
        cpu_threads.set_num_threads(kernel_threads)
        torch.set_num_threads(threads)
    assert platform.preferred_dtype(torch.bfloat16) is torch.float32
    platform.synchronize()


def test_meminfo_in_bytes(tmp_path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  100 kB\nMemFree: 5 kB\nMemAvailable:   40 kB\n")
    assert cpu.host_memory(meminfo) == (102_400, 40_960)
    total, available = cpu.host_memory(tmp_path / "absent")
    assert 0 < available <= total
