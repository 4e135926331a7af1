"""Memory for packed weights, in 2 MiB pages where the system grants them.

A step reads every weight once, so with 4 KiB pages it misses the TLB once per page and the prefetchers stop at each
page's end. Weights are carved out of large areas, because one alone would often not fill a large page. An area lives
as long as a weight in it. Where the platform has the threads on several memory nodes, so are the pages.

Who knows what is coming says so with ``reserve``: then all of it lies in one area. Nothing gets pages in advance: a
thread that did so beside packing from mapped files, measured, cost more than it gave.
"""

from __future__ import annotations

import ctypes
import math
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from ...platforms import cpu_threads
from .library import library

_PAGE = 2 << 20
_CHUNK = 32 * _PAGE
_ALIGNMENT = 256
_LONG_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)

_lock = threading.Lock()
_rest = torch.empty(0, dtype=torch.uint8)
_reservation: _Reservation | None = None


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An uninitialized contiguous tensor, aligned to 256 bytes."""
    num_bytes = math.prod(shape) * dtype.itemsize
    taken = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
    with _lock:
        area = _take(taken)
    return area[:num_bytes].view(dtype).view(shape)


def scratch(num_bytes: int) -> Tensor:
    """uint8 memory for what is soon done with, uninitialized.

    While a reservation is open, it is taken again as soon as no tensor of it is left: new pages would be cleared.
    """
    with _lock:
        area = np.empty(num_bytes, np.uint8) if _reservation is None else _reservation.scratch(num_bytes)
    return torch.from_numpy(area) if num_bytes else torch.empty(0, dtype=torch.uint8)


@contextmanager
def reserve(num_bytes: int) -> Iterator[None]:
    """While this is open, ``empty`` takes from one area of ``num_bytes``.

    An estimate: what does not fit is allocated as ever, and memory that nobody took is never backed by pages. One
    reservation is open at a time; another one does nothing.
    """
    global _reservation
    if num_bytes < _CHUNK:
        yield
        return
    with _lock:
        opened = _Reservation(num_bytes) if _reservation is None else None
        _reservation = opened or _reservation
    try:
        yield
    finally:
        if opened is not None:
            with _lock:
                _reservation = None


class _Reservation:
    """An area, and how much of it is taken."""

    def __init__(self, num_bytes: int) -> None:
        self._area = _allocate(-(-num_bytes // _PAGE) * _PAGE)
        self._taken = 0
        self._scratch = np.empty(0, np.uint8)

    def scratch(self, num_bytes: int) -> np.ndarray:
        # The attribute and the call's argument: no array or tensor that shares this memory is left.
        if sys.getrefcount(self._scratch) > 2 or len(self._scratch) < num_bytes:
            self._scratch = np.empty(num_bytes, np.uint8)
        return self._scratch[:num_bytes]

    def take(self, num_bytes: int) -> Tensor | None:
        first = self._taken
        if first + num_bytes > len(self._area):
            return None
        self._taken = first + num_bytes
        return self._area[first : first + num_bytes]


def _take(num_bytes: int) -> Tensor:
    global _rest
    reserved = _reservation.take(num_bytes) if _reservation is not None else None
    if reserved is not None:
        return reserved
    if num_bytes > _CHUNK // 2:
        return _allocate(num_bytes)
    if num_bytes > len(_rest):
        _rest = _allocate(_CHUNK)
    area, _rest = _rest[:num_bytes], _rest[num_bytes:]
    return area


def _allocate(num_bytes: int) -> Tensor:
    """Bytes from a page's start on; pages that nobody writes to are never backed."""
    area = torch.empty(num_bytes + _PAGE, dtype=torch.uint8)
    area = area[-area.data_ptr() % _PAGE :][:num_bytes]
    library().twofold_advise_large_pages(area.data_ptr(), num_bytes)
    nodes = cpu_threads.memory_nodes()
    if nodes:
        words = (ctypes.c_ulong * (max(nodes) // _LONG_BITS + 1))()
        for node in nodes:
            words[node // _LONG_BITS] |= 1 << node % _LONG_BITS
        library().twofold_spread_pages(area.data_ptr(), num_bytes, ctypes.addressof(words), len(words))
    return area
