"""TensorSource: what a format reads from."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class TensorSource(Protocol):
    """Named tensors on disk; ``get`` reads one. A checkpoint reader satisfies it."""

    @property
    def names(self) -> frozenset[str]:
        """Every tensor there is."""
        ...

    def has(self, name: str) -> bool: ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape from the header, without reading the data."""
        ...

    def dtype(self, name: str) -> torch.dtype: ...

    def get(self, name: str) -> Tensor:
        """Read one tensor; CheckpointError when it is missing or cut off."""
        ...

    def location(self, name: str) -> str:
        """Where the tensor lies, for messages: the file's name, or the files searched when there is none."""
        ...
