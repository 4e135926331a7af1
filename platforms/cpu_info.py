"""Facts about the processor: name, instruction sets, logical CPUs that this process may use."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
from dataclasses import dataclass
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")

# x86-64 psABI micro-architecture levels, in the kernel's flag names.
_X86_LEVELS = (
    (2, {"cx16", "lahf_lm", "popcnt", "sse4_1", "sse4_2", "ssse3"}),
    (3, {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"}),
    (4, {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}),
)


@dataclass(frozen=True, slots=True)
class CpuInfo:
    """One processor: ``arch`` is ``x86-64-v3``, ``aarch64`` and so on, ``features`` the kernel's flags."""

    name: str
    arch: str
    features: frozenset[str]

    def fingerprint(self) -> str:
        """A key under which code compiled for exactly this processor may be kept."""
        text = "|".join((self.name, self.arch, *sorted(self.features)))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def x86_level(features: frozenset[str]) -> int:
    """The highest x86-64 level (1 to 4) whose flags, and all lower levels', are present."""
    level = 1
    for candidate, needed in _X86_LEVELS:
        if not needed <= features:
            break
        level = candidate
    return level


def parse_cpuinfo(text: str, machine: str) -> CpuInfo:
    """Read the text of /proc/cpuinfo (x86 or Arm wording)."""
    name, features = "", frozenset[str]()
    for section in text.strip().split("\n\n"):
        fields = dict(_field(line) for line in section.splitlines() if ":" in line)
        name = name or fields.get("model name", "") or fields.get("Hardware", "")
        features = features or frozenset((fields.get("flags") or fields.get("Features") or "").split())
    arch = f"x86-64-v{x86_level(features)}" if machine in ("x86_64", "AMD64") else machine
    return CpuInfo(name or machine, arch, features)


def _field(line: str) -> tuple[str, str]:
    key, _, value = line.partition(":")
    return key.strip(), value.strip()


@functools.cache
def cpu_info() -> CpuInfo:
    """This machine's processor; without /proc/cpuinfo only what the ``platform`` module knows."""
    text = _CPUINFO.read_text() if _CPUINFO.exists() else ""
    return parse_cpuinfo(text, platform.machine())


def allowed_cpus() -> frozenset[int]:
    """Logical processors that the scheduler lets this process use."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))
