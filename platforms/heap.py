"""The C library's heap: what a load has freed goes back to the system."""

from __future__ import annotations

import ctypes
import gc


def trim_heap() -> None:
    """Collect what nobody uses and give the pages of free memory back, where the C library can (glibc).

    Costs some tens of milliseconds; worth it once, after a load.
    """
    gc.collect()
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # another C library, or none that can be asked
        return
    trim(0)
