"""Pages of mapped files count as a process's memory until they are let go; nothing here needs torch."""

from __future__ import annotations

import mmap

# Runs of rows begin at a multiple of this, as the panels do that they become.
ROW_MULTIPLE = 64
# A fault maps cached pages around it, too (Linux: 64 KiB), so that what was let go before comes back.
_FAULT_AROUND = 64 << 10


def let_go(area: mmap.mmap, start: int, end: int) -> None:
    """Drop the pages of bytes ``start`` (a page's first) to ``end`` from this process: the file has them still.

    So go some before them, which a first look at these had mapped. What was written to a private mapping is lost.
    """
    if hasattr(mmap, "MADV_DONTNEED") and end > start:
        start = max(start - _FAULT_AROUND, 0)
        area.madvise(mmap.MADV_DONTNEED, start, end - start)


def rows_at_once(num_bytes: int, row_bytes: int) -> int:
    """Rows of about ``num_bytes`` together, at least one."""
    step = max(1, num_bytes // max(row_bytes, 1))
    return step // ROW_MULTIPLE * ROW_MULTIPLE or step
