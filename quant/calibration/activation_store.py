"""Hidden states of all calibration windows between two layers, in 16 bits, on disk above a limit."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from ...storage import allocate, writing

# Larger values become infinite in float16.
_FLOAT16_LIMIT = 6e4


class ActivationStore:
    """A sequence of equally shaped batches [B, L, K], replaced one by one.

    ``limit`` bytes are kept in memory; a store that needs more lies in a file under ``folder``, which goes with it.
    Values are float16, from the first batch that does not fit its range on bfloat16.
    """

    def __init__(self, shape: tuple[int, int, int], limit: int, folder: Path | None = None) -> None:
        self.is_on_disk = 2 * shape[0] * shape[1] * shape[2] > limit
        self._file = tempfile.TemporaryFile(dir=folder) if self.is_on_disk else None  # noqa: SIM115
        count = shape[0] * shape[1] * shape[2]
        if self._file is not None:
            with writing(Path(folder or tempfile.gettempdir())):
                allocate(self._file, 2 * count)  # a page that a full disk cannot take would end the process
            path = f"/proc/self/fd/{self._file.fileno()}"
            self._bits = torch.from_file(path, shared=True, size=count, dtype=torch.int16).view(shape)
        else:
            self._bits = torch.empty(shape, dtype=torch.int16)
        self._dtypes = [torch.float16] * shape[0]

    def __len__(self) -> int:
        return self._bits.shape[0]

    def get(self, start: int, end: int) -> Tensor:
        """Sequences [start, end) in float32."""
        parts = [self._bits[i].view(self._dtypes[i]).float() for i in range(start, end)]
        return torch.stack(parts)

    def put(self, start: int, values: Tensor) -> None:
        """Replace the sequences from ``start`` on."""
        for offset, sequence in enumerate(values):
            fits = float(sequence.abs().max()) < _FLOAT16_LIMIT
            dtype = torch.float16 if fits else torch.bfloat16
            self._dtypes[start + offset] = dtype
            self._bits[start + offset] = sequence.to(dtype).view(torch.int16)

    def batches(self, size: int) -> Iterator[tuple[int, Tensor]]:
        """(start, float32 values) of ``size`` sequences at a time."""
        for start in range(0, len(self), size):
            yield start, self.get(start, min(start + size, len(self)))

    def update(self, size: int, compute: Callable[[Tensor], Tensor]) -> None:
        """Replace every batch by what ``compute`` makes of it."""
        for start, values in self.batches(size):
            self.put(start, compute(values))
