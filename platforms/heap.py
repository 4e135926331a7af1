"""The C library's heap: what a load has freed goes back to the system."""

from __future__ import annotations

import ctypes
import gc
import time

# Steps of so many tokens and more leave megabytes in the heap; later ones that are so much smaller need few of them.
_LARGE_TOKENS = 256
_SMALLER = 4
# Giving pages back takes some milliseconds, and a later step's new pages are cleared.
_PAUSE_S = 10.0


def trim_heap() -> None:
    """Collect what nobody uses and give the pages of free memory back, where the C library can (glibc).

    Costs some tens of milliseconds; worth it once, after a load.
    """
    gc.collect()
    give_back_pages()


def give_back_pages() -> None:
    """Give the pages of free memory back to the system, where the C library can (glibc)."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # another C library, or none that can be asked
        return
    trim(0)


class StepHeap:
    """Gives back what a prompt's activations took once steps are small again, at most once in some seconds.

    Else it stays in the heap, below blocks in use, while the KV cache goes on to grow beside it.
    """

    def __init__(self) -> None:
        self._largest = 0
        self._not_before = 0.0

    def stepped(self, num_tokens: int) -> bool:
        """A step of so many tokens is done; whether pages were given back."""
        self._largest = max(self._largest, num_tokens)
        if self._largest < max(_LARGE_TOKENS, _SMALLER * num_tokens) or time.monotonic() < self._not_before:
            return False
        give_back_pages()
        self._largest, self._not_before = num_tokens, time.monotonic() + _PAUSE_S
        return True
