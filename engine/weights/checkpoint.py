"""Checkpoint: named tensors on disk, and a record of which of them were used."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from ...errors import CheckpointError
from ...quant.formats.missing import missing


class Checkpoint(ABC):
    """Tensors under their Hugging Face names, read one at a time.

    ``path`` is the folder or file. ``taken`` holds the names that were read or declared used.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.taken: set[str] = set()

    @property
    @abstractmethod
    def names(self) -> frozenset[str]:
        """Every tensor there is."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Shape from the header, without reading the data."""

    @abstractmethod
    def dtype(self, name: str) -> torch.dtype:
        """The dtype that ``get`` returns."""

    @abstractmethod
    def location(self, name: str) -> str:
        """The file that holds the tensor, or the files searched when there is none."""

    @abstractmethod
    def _read(self, name: str) -> Tensor:
        """The tensor's data; ``name`` exists."""

    def has(self, name: str) -> bool:
        return name in self.names

    def get(self, name: str) -> Tensor:
        """Read one tensor and count it as taken; CheckpointError when it is missing."""
        if name not in self.names:
            raise CheckpointError(missing(self, name))
        self.taken.add(name)
        return self._read(name)

    def rows(self, name: str) -> Iterator[tuple[int, Tensor]]:
        """(first row, some rows of the tensor) until all were read; what it yields is valid until the next.

        It counts as taken; CheckpointError when it is missing. A tensor [] or of no elements is read at once.
        """
        yield 0, self.get(name)

    def mapped(self, name: str) -> Tensor | None:
        """The tensor as a view of its file, which counts as taken; None where that is not possible.

        Its pages are read when they are first used and belong to the system's cache; whoever writes to it gets a copy
        of the page.
        """
        return None

    def let_go(self) -> None:
        """The load is over: pages of mapped files leave this process's memory, and come back as they are used."""
        return None

    def unused(self) -> list[str]:
        """Names that nothing has taken yet, sorted."""
        return sorted(self.names - self.taken)
