"""Memory for what a step computes: places are reused as the step frees them."""

from __future__ import annotations

import ctypes
import math
from collections import deque

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from . import weight_memory

_ALIGNMENT = 256
_PAGE = 2 << 20
_CHUNK = 4 << 20
_DONTNEED = 4  # madvise's, on Linux
_NUMPY_TYPES = {torch.float32: np.float32, torch.uint8: np.uint8, torch.int32: np.int32, torch.int64: np.int64}


class _Place(np.ndarray):  # type: ignore[type-arg]
    """A tensor's memory; ``returned`` hears of its end, which comes with that of the last view."""

    returned: deque[tuple[int, int, int, int]] | None = None
    where: tuple[int, int, int, int]

    def __del__(self) -> None:
        if self.returned is not None:
            self.returned.append(self.where)


class Arena:
    """Gives out tensors whose places return when the last view of them is gone; ``restart`` takes all back at once.

    Memory comes in chunks of ``chunk_bytes`` or more, of which what nobody has written to takes none. Tensors may end
    in any thread, the rest is for one.
    """

    def __init__(self, chunk_bytes: int = _CHUNK) -> None:
        self._chunk_bytes = chunk_bytes
        self._chunks: list[NDArray[np.uint8]] = []
        self._free: list[list[tuple[int, int]]] = []  # per chunk [start, end) in order, no two adjacent
        self._returned: deque[tuple[int, int, int, int]] = deque()
        self._generation = 0

    @property
    def num_bytes(self) -> int:
        return sum(len(chunk) for chunk in self._chunks)

    def restart(self) -> None:
        """Everything is free again; tensors that are still there keep their contents until their place is reused."""
        self._generation += 1
        self._free = [[(0, len(chunk))] for chunk in self._chunks]

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialized contiguous tensor."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes == 0:
            return torch.empty(shape, dtype=dtype)
        index, start, end = self._place(-(-num_bytes // _ALIGNMENT) * _ALIGNMENT)
        known = _NUMPY_TYPES.get(dtype)
        if known is None:
            place = _Place((num_bytes,), np.uint8, self._chunks[index], start)
        else:
            place = _Place(shape, known, self._chunks[index], start)
        place.where, place.returned = (self._generation, index, start, end), self._returned
        tensor = torch.from_numpy(place)
        return tensor if known is not None else tensor.view(dtype).view(shape)

    def give_back_pages(self) -> None:
        """Whole pages of free places go back to the system; they are cleared when they are next written to."""
        self._collect()
        for chunk, free in zip(self._chunks, self._free, strict=True):
            base = chunk.ctypes.data
            for start, end in free:
                first, last = -(-(base + start) // _PAGE) * _PAGE, (base + end) // _PAGE * _PAGE
                if first < last:
                    ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _DONTNEED)

    def _place(self, num_bytes: int) -> tuple[int, int, int]:
        """The next tensor's: chunk, start, end."""
        return self._take(num_bytes)

    def _take(self, num_bytes: int) -> tuple[int, int, int]:
        self._collect()
        for index, free in enumerate(self._free):
            for place, (start, end) in enumerate(free):
                if end - start >= num_bytes:
                    free[place : place + 1] = [(start + num_bytes, end)] if end - start > num_bytes else []
                    return index, start, start + num_bytes
        size = max(self._chunk_bytes, num_bytes)
        self._chunks.append(weight_memory.empty((size,), torch.uint8).numpy())
        self._free.append([(0, size)])
        return self._take(num_bytes)

    def _collect(self) -> None:
        """Take back the places of tensors that have ended."""
        while self._returned:
            generation, index, start, end = self._returned.popleft()
            if generation == self._generation:
                self._give_back(index, start, end)

    def _give_back(self, index: int, start: int, end: int) -> None:
        merged: list[tuple[int, int]] = []
        for first, last in sorted([*self._free[index], (start, end)]):
            if merged and merged[-1][1] == first:
                merged[-1] = merged[-1][0], last
            else:
                merged.append((first, last))
        self._free[index] = merged
