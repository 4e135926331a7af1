"""Graphs: a step's work on a device, recorded once and repeated in one call on whatever its input tensors hold then."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from torch import Tensor

Step = Callable[[], tuple[Tensor, ...]]


class UnrecordableError(Exception):
    """A step cannot be recorded; the message says which of its operations is in the way."""


class Graph(ABC):
    """A recorded step. ``outputs`` hold the results of the last replay until any graph of its recorder is replayed."""

    outputs: tuple[Tensor, ...]

    @abstractmethod
    def replay(self) -> None:
        """Compute the step again from what its input tensors hold now."""


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

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Memory of all graphs so far: results between operations, and the recordings themselves."""
