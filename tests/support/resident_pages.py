"""How much of a mapped file is in this process's memory."""

from __future__ import annotations

import re
from pathlib import Path


def resident_kib(path: Path) -> int:
    """KiB of a file's mappings, as the kernel counts them."""
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            inside = line.endswith(str(path))
        elif inside and line.startswith("Rss:"):
            found += int(line.split()[1])
    return found
