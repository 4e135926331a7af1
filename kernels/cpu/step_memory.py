"""Where operations write what they compute for a large step: one area of large pages, used again and again.

The C library's heap would hold some small block between two large ones, so that a step of 1,024 tokens took twice the
memory that it needs at once, and pages that it gives back are cleared anew at the next step. While no step is open, or
for a small result, torch allocates as ever: so it does while a step is recorded, which has an arena of its own.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from .arena import Arena

# Bytes from which on a result lies here; less is no matter, and the C library's heap is quicker.
_LARGE = 256 << 10
# Of address space: only what a step writes to becomes memory.
_CHUNK = 256 << 20


class _Thread(threading.local):
    """Each thread that steps has its own."""

    is_open = False
    arena: Arena | None = None


_own = _Thread()


def empty(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """An uninitialized contiguous tensor, which may outlive the step."""
    if not _own.is_open or math.prod(shape) * dtype.itemsize < _LARGE:
        return torch.empty(shape, dtype=dtype)
    if _own.arena is None:
        _own.arena = Arena(_CHUNK)
    return _own.arena.empty(shape, dtype)


@contextmanager
def step(is_open: bool = True) -> Iterator[None]:
    """Open while this thread computes a step, operation by operation; not while it records one in the midst of that."""
    before, _own.is_open = _own.is_open, is_open
    try:
        yield
    finally:
        _own.is_open = before


def give_back_pages() -> None:
    """What no tensor lies in goes back to the system."""
    if _own.arena is not None:
        _own.arena.give_back_pages()
