"""Graphs: a step's work on a device, recorded once and repeated in one call on whatever its input tensors hold then."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from torch import Tensor

Step = Callable[[], tuple[Tensor, ...]]
SizedStep = Callable[[int, int], tuple[Tensor, ...]]


class UnrecordableError(Exception):
    """A step cannot be recorded; the message says which of its operations is in the way."""


class Graph(ABC):
    """A recorded step. ``outputs`` hold the results of the last replay until any graph of its recorder is replayed."""

    outputs: tuple[Tensor, ...]

    @abstractmethod
    def replay(self) -> None:
        """Compute the step again from what its input tensors hold now."""


class SizedGraph(ABC):
    """A step recorded for a range of sizes: of so many tokens, in so many requests."""

    @abstractmethod
    def replay(self, num_tokens: int, num_requests: int) -> tuple[Tensor, ...]:
        """Compute a step of these sizes; what it gives, a row per token, holds until the next replay."""


class GraphRecorder(ABC):
    """Records steps of one device. Graphs of one recorder share their memory: one is replayed after the other.

    ``name`` says in a few words how steps are recorded.
    """

    name: str

    @abstractmethod
    def rows_for(self, num_rows: int) -> int:
        """The number of rows of the graph for so many, at least as many: how coarsely batches are padded."""

    @abstractmethod
    def record(self, step: Step) -> Graph:
        """Record what ``step`` does; UnrecordableError where that is not possible.

        It may be run meanwhile, so its inputs must be such that it changes nothing. All tensors that it reads and does
        not make live as long as the graph, in their place.
        """

    def record_sized(self, step: SizedStep, smallest: tuple[int, int], largest: tuple[int, int]) -> SizedGraph | None:
        """Record ``step(num_tokens, num_requests)`` for all sizes from ``smallest`` to ``largest``.

        None where graphs have one size each. UnrecordableError as ``record``, or where sizes differ in more than
        numbers that grow with them.
        """
        return None

    def give_back_pages(self) -> None:
        """What the last replay of a sized graph left in memory goes back to the system."""
        return None

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Memory of all graphs so far: results between operations, and the recordings themselves."""
