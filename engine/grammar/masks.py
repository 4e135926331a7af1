"""TokenMasks: the constraints of a step's rows, computed beside the model and laid over its logits."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...platforms import cpu_threads
from .constraint import Constraint

_BITS = 32
BANNED = float("-inf")


class TokenMasks:
    """One step's masks: ``places`` [C] of the constrained rows, ``bits`` int32 [C, ceil(V/32)], bit i of word w for
    token ``32 w + i``."""

    def __init__(self, places: list[int], bits: NDArray[np.int32]) -> None:
        self._places = places
        self._bits = bits

    def apply(self, logits: Tensor) -> None:
        """Set what may not be drawn to -inf, in place; logits [R, V] float32."""
        if not self._places:
            return
        vocab_size = logits.shape[1]
        if logits.device.type == "cpu":
            allowed = np.unpackbits(self._bits.view(np.uint8), axis=1, count=vocab_size, bitorder="little")
            banned = torch.from_numpy(allowed == 0)
            if len(self._places) == len(logits):
                logits.masked_fill_(banned, BANNED)
                return
            for row, place in zip(banned, self._places, strict=True):
                logits[place].masked_fill_(row, BANNED)
            return
        banned = unpack_banned(torch.from_numpy(self._bits).to(logits.device, non_blocking=True), vocab_size)
        places = torch.tensor(self._places, device=logits.device)
        logits[places] = logits[places].masked_fill(banned, BANNED)


def unpack_banned(words: Tensor, vocab_size: int) -> Tensor:
    """bool [C, V] on the device of ``words`` int32 [C, ceil(V/32)]: True where a token's bit is not set."""
    shifts = torch.arange(_BITS, dtype=torch.int32, device=words.device)
    return ((words[:, :, None] >> shifts) & 1).flatten(1)[:, :vocab_size] == 0


class MaskMaker:
    """Computes masks in one thread, most of the time without Python's lock."""

    def __init__(self, vocab_size: int) -> None:
        self._num_words = -(-vocab_size // _BITS)
        self._thread: ThreadPoolExecutor | None = None

    def start(self, constraints: Sequence[Constraint | None]) -> Future[TokenMasks] | None:
        """Begin the masks of rows in this order, None for a free one; None where nothing is constrained."""
        found = [(place, constraint) for place, constraint in enumerate(constraints) if constraint is not None]
        if not found:
            return None
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "twofold-masks", initializer=cpu_threads.leave_team)
        return self._thread.submit(self._fill, found)

    def _fill(self, found: list[tuple[int, Constraint]]) -> TokenMasks:
        bits = np.zeros((len(found), self._num_words), dtype=np.int32)
        places: list[int] = []
        for place, constraint in found:
            if constraint.fill(bits[len(places)]):
                places.append(place)
        return TokenMasks(places, bits[: len(places)])
