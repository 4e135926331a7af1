"""Memory for what a recorded step computes: places are reused as the step frees them, in the order of its calls."""

from __future__ import annotations

import math
import weakref

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from . import weight_memory

_ALIGNMENT = 256
_CHUNK = 4 << 20


class Arena:
    """Gives out tensors whose places return when the last view of them is gone; ``restart`` takes all back at once."""

    def __init__(self) -> None:
        self._chunks: list[NDArray[np.uint8]] = []
        self._free: list[list[tuple[int, int]]] = []  # per chunk [start, end) in order, no two adjacent
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
        index, start, end = self._take(-(-num_bytes // _ALIGNMENT) * _ALIGNMENT)
        # The tensor's storage holds this array, and nothing else does.
        place = self._chunks[index][start : start + num_bytes]
        weakref.finalize(place, self._give_back, self._generation, index, start, end).atexit = False
        return torch.from_numpy(place).view(dtype).view(shape)

    def _take(self, num_bytes: int) -> tuple[int, int, int]:
        for index, free in enumerate(self._free):
            for place, (start, end) in enumerate(free):
                if end - start >= num_bytes:
                    free[place : place + 1] = [(start + num_bytes, end)] if end - start > num_bytes else []
                    return index, start, start + num_bytes
        size = max(_CHUNK, num_bytes)
        self._chunks.append(weight_memory.empty((size,), torch.uint8).numpy())
        self._free.append([(0, size)])
        return self._take(num_bytes)

    def _give_back(self, generation: int, index: int, start: int, end: int) -> None:
        if generation != self._generation:
            return
        merged: list[tuple[int, int]] = []
        for first, last in sorted([*self._free[index], (start, end)]):
            if merged and merged[-1][1] == first:
                merged[-1] = merged[-1][0], last
            else:
                merged.append((first, last))
        self._free[index] = merged
