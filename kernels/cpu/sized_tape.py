"""A tape for steps of any size in a range: the words that follow the sizes are written anew before each replay.

The step is recorded at several sizes. What is the same each time is constant, and every other word must be
``a * tokens + b * requests + c``: two sizes beside the largest tell a and b, the smallest one checks them. So counts of
rows and elements and addresses may grow with a step, in arguments as well as in arrays of sizes; a step that does other
work at another size is refused.
"""

from __future__ import annotations

import bisect
import ctypes
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...platforms.graphs import SizedGraph, UnrecordableError
from . import tape_program, weight_memory
from .arena import Arena

_WORD = 8
_ALIGNMENT = 64
# Of address space: only what a step writes to becomes memory.
_CHUNK = 64 << 20


@dataclass(frozen=True, slots=True)
class Recording:
    """What a step of ``sizes`` (tokens, requests) calls: as ``Tape`` has it, with its arrays."""

    sizes: tuple[int, ...]
    names: list[str]
    program: bytes
    arrays: list[tuple[int, ctypes.Array[Any]]]
    outputs: tuple[Tensor, ...]

    def words(self) -> NDArray[np.int64]:
        """The program with 0 for the addresses of arrays, the contents of these, each from a word's start on, and the
        addresses of the outputs.
        """
        words = np.frombuffer(self.program, np.int64).copy()
        words[[place for place, _ in self.arrays]] = 0
        contents = [bytes(array).ljust(_words(array) * _WORD, b"\0") for _, array in self.arrays]
        addresses = np.array([output.data_ptr() for output in self.outputs], np.int64)
        return np.concatenate([words, np.frombuffer(b"".join(contents), np.int64), addresses])


class SizedTape(SizedGraph):
    """``first`` is of the largest size, ``fewer_tokens`` and ``fewer_requests`` have one less of either.

    ``area`` uint8 holds the outputs, whose first dimension is that of tokens.
    """

    def __init__(
        self,
        area: Tensor,
        first: Recording,
        fewer_tokens: Recording,
        fewer_requests: Recording,
        smallest: Recording,
    ) -> None:
        self.names = first.names
        self._area = area
        self._outputs = first.outputs
        if any(len(output) != first.sizes[0] for output in first.outputs):
            raise UnrecordableError("what it gives has not a row per token")
        words = first.words()
        others = [_comparable(first, words, other) for other in (fewer_tokens, fewer_requests, smallest)]
        per_token, per_request = words - others[0], words - others[1]
        rest = words - per_token * first.sizes[0] - per_request * first.sizes[1]
        if not np.array_equal(others[2], per_token * smallest.sizes[0] + per_request * smallest.sizes[1] + rest):
            raise UnrecordableError("what its kernels are told does not grow evenly with the step")
        end = len(first.program) // _WORD
        for place, array in first.arrays:
            words[place] = words.ctypes.data + end * _WORD
            end += _words(array)
        self._words = words
        self._changing = np.flatnonzero((per_token != 0) | (per_request != 0))
        self._per_token, self._per_request, self._rest = (
            each[self._changing] for each in (per_token, per_request, rest)
        )

    def replay(self, num_tokens: int, num_requests: int) -> tuple[Tensor, ...]:
        self._set_sizes(num_tokens, num_requests)
        tape_program.run(self._words.ctypes.data, self.names)
        return tuple(
            self._output(like, int(address) - self._area.data_ptr(), num_tokens)
            for like, address in zip(self._outputs, self._words[-len(self._outputs) :], strict=True)
        )

    def _output(self, like: Tensor, start: int, num_tokens: int) -> Tensor:
        size = like.dtype.itemsize
        return self._area.view(like.dtype).as_strided((num_tokens, *like.shape[1:]), like.stride(), start // size)

    def timed_replay(self, num_tokens: int, num_requests: int) -> list[int]:
        """Replay, and the nanoseconds of each call."""
        self._set_sizes(num_tokens, num_requests)
        return tape_program.timed(self._words.ctypes.data, self.names)

    def _set_sizes(self, num_tokens: int, num_requests: int) -> None:
        self._words[self._changing] = self._per_token * num_tokens + self._per_request * num_requests + self._rest


class SizedArena(Arena):
    """Places that grow with the tokens of a step: a small step lies in as little memory as if there were no other.

    The smallest step is recorded first (``measure``), which shows how long each tensor lives and what it takes for each
    token; places are then chosen once, the widest first (``lay_out``, then ``repeat`` for each recording). A kernel may
    round rows up to whole tiles, which counts most in the smallest step.
    """

    def __init__(self) -> None:
        super().__init__(_CHUNK)
        self._tokens = 1
        self._num_bytes = 0
        self._lives: list[_Life] = []
        self._live: dict[tuple[int, int], _Life] = {}
        self._repeated: Iterator[_Life] | None = None

    @property
    def num_bytes(self) -> int:
        """Of the largest step."""
        return self._num_bytes

    @property
    def area(self) -> Tensor:
        """All the memory, uint8, once it is laid out."""
        return torch.from_numpy(self._chunks[0])

    def measure(self, num_tokens: int) -> None:
        """What comes is a step of so many tokens, the least."""
        self.restart()
        self._tokens, self._lives, self._live, self._repeated = num_tokens, [], {}, None

    def lay_out(self, num_tokens: int) -> None:
        """Make room for up to so many tokens."""
        placed: list[_Life] = []
        for life in sorted(self._lives, key=lambda life: -life.width):
            for other in placed:  # in the order of their offsets
                if other.first <= life.last and life.first <= other.last:
                    if other.offset >= life.offset + life.width:
                        break
                    life.offset = max(life.offset, other.offset + other.width)
            bisect.insort(placed, life, key=lambda life: life.offset)
        self._num_bytes = max((life.offset + life.width for life in placed), default=1) * num_tokens
        # An area of its own, so that no page is shared.
        self._chunks = [weight_memory.empty((max(self._num_bytes, _CHUNK),), torch.uint8).numpy()]
        self.restart()

    def repeat(self, num_tokens: int) -> None:
        """What comes is the step that was measured, with so many tokens."""
        self._tokens, self._repeated = num_tokens, iter(self._lives)

    def _place(self, num_bytes: int) -> tuple[int, int, int]:
        if self._repeated is None:
            return self._measured(num_bytes)
        life = next(self._repeated, _Life(0, 0))
        if life.width * self._tokens < num_bytes:
            raise UnrecordableError("what its tensors take does not grow evenly with the step")
        return 0, life.offset * self._tokens, (life.offset + life.width) * self._tokens

    def _measured(self, num_bytes: int) -> tuple[int, int, int]:
        now = len(self._lives)
        for generation, index, start, _ in tuple(self._returned):
            if generation == self._generation:
                self._live.pop((index, start)).last = now - 1
        place = self._take(num_bytes)
        width = -(-num_bytes // (self._tokens * _ALIGNMENT)) * _ALIGNMENT
        self._live[place[:2]] = _Life(now, width)
        self._lives.append(self._live[place[:2]])
        return place


@dataclass(slots=True)
class _Life:
    """A tensor: what was the first to be made while it lived, itself, and what the last; bytes for each token."""

    first: int
    width: int
    last: int = sys.maxsize
    offset: int = 0


def _comparable(first: Recording, words: NDArray[np.int64], other: Recording) -> NDArray[np.int64]:
    """The words of ``other``, where it makes the calls of ``first``."""
    shapes = [[(place, len(bytes(array))) for place, array in each.arrays] for each in (first, other)]
    if first.names != other.names or shapes[0] != shapes[1]:
        raise UnrecordableError("a step of another size makes other calls")
    return other.words()


def _words(array: ctypes.Array[Any]) -> int:
    return -(-ctypes.sizeof(array) // _WORD)
