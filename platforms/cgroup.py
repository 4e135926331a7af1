"""Limits that a container sets for this process: memory and CPU time, cgroup version 1 or 2.

A limit may stand at any level of the hierarchy, so every ancestor of the process's own group is asked.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Version 1 says "no limit" with a number just under 2**63.
_NO_LIMIT = 1 << 60


@dataclass(frozen=True, slots=True)
class CgroupMemory:
    """``limit`` bytes that the group may use and the ``usage`` that cannot be reclaimed at once."""

    limit: int
    usage: int


def memory_limit(root: Path = Path("/sys/fs/cgroup"), process: Path = Path("/proc/self/cgroup")) -> CgroupMemory | None:
    """The tightest memory limit (least room left) over this process's groups, or None."""
    found: list[CgroupMemory] = []
    for folder in _folders(root, process, "memory"):
        for limit_name, usage_name, cache_key in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit, usage = _number(folder / limit_name), _number(folder / usage_name)
            if limit is not None and limit < _NO_LIMIT:
                cache = _stat(folder / "memory.stat", cache_key)
                found.append(CgroupMemory(limit, max(0, (usage or 0) - cache)))
    return min(found, key=lambda memory: memory.limit - memory.usage, default=None)


def cpu_quota(root: Path = Path("/sys/fs/cgroup"), process: Path = Path("/proc/self/cgroup")) -> float | None:
    """CPUs' worth of time that the container grants, such as 1.5, or None."""
    quotas: list[float] = []
    for folder in _folders(root, process, "cpu"):
        words = _text(folder / "cpu.max").split()
        if len(words) == 2 and words[0].isdigit():
            quotas.append(int(words[0]) / int(words[1]))
        quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
        if quota is not None and quota > 0 and period:
            quotas.append(quota / period)
    return min(quotas, default=None)


def _folders(root: Path, process: Path, controller: str) -> Iterator[Path]:
    """Each existing folder of this process's groups for a controller, from the innermost out to the mount's root."""
    for line in _text(process).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        base = root / controllers if controllers else root
        if controllers and not base.exists():
            base = root / controller
        relative = [part for part in path.split("/") if part]
        for depth in range(len(relative), -1, -1):
            folder = base.joinpath(*relative[:depth])
            if folder.is_dir():
                yield folder


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.lstrip("-").isdigit() else None


def _stat(path: Path, key: str) -> int:
    for line in _text(path).splitlines():
        name, _, value = line.partition(" ")
        if name == key:
            return int(value)
    return 0
