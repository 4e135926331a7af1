"""A folder of safetensors files: one file, or shards with an index."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from ...errors import CheckpointError, UnsupportedError
from ...log import get_logger
from ...quant.formats.missing import missing
from .checkpoint import Checkpoint
from .file_pages import let_go
from .fused_experts import split_experts
from .safetensors_header import DTYPES, TensorEntry, read_header
from .safetensors_read import map_file, read_rows, read_tensor, view_of
from .text_part import text_part
from .weight_files import INDEX_FILE, SINGLE_FILE, weight_files, weight_map_of

logger = get_logger(__name__)


class SafetensorsCheckpoint(Checkpoint):
    """All tensors of a folder; headers are read and checked at once, data when asked for."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._entries = _read_entries(path)
        self._names = frozenset(self._entries)
        self._mappings: list[mmap.mmap] = []

    @property
    def names(self) -> frozenset[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).shape

    def dtype(self, name: str) -> torch.dtype:
        entry = self._entry(name)
        if entry.dtype not in DTYPES:
            raise UnsupportedError(f"tensor {name} in {entry.file} has dtype {entry.dtype}, which is not read")
        return DTYPES[entry.dtype]

    def location(self, name: str) -> str:
        if name in self._entries:
            return str(self._entries[name].file)
        files = sorted({entry.file.name for entry in self._entries.values()})
        return f"{self.path} ({len(files)} files, {files[0]} to {files[-1]})" if len(files) > 1 else str(self.path)

    def _entry(self, name: str) -> TensorEntry:
        if name not in self._entries:
            raise CheckpointError(missing(self, name))
        return self._entries[name]

    def rows(self, name: str) -> Iterator[tuple[int, Tensor]]:
        self.dtype(name)  # refuses what has no dtype in torch
        if not self._entries[name].shape:
            yield from super().rows(name)
            return
        self.taken.add(name)
        yield from read_rows(name, self._entries[name])

    def mapped(self, name: str) -> Tensor | None:
        self.dtype(name)  # refuses what has no dtype in torch
        entry = self._entries[name]
        mapping = map_file(name, entry)
        if mapping is None:
            return None
        self.taken.add(name)
        self._mappings.append(mapping[0])
        return view_of(*mapping, entry)

    def let_go(self) -> None:
        for area in self._mappings:
            let_go(area, 0, len(area))

    def _read(self, name: str) -> Tensor:
        self.dtype(name)  # refuses what has no dtype in torch
        return read_tensor(name, self._entries[name])


def _read_entries(path: Path) -> dict[str, TensorEntry]:
    entries: dict[str, TensorEntry] = {}
    for file in weight_files(path):
        for name, entry in read_header(file).items():
            if name in entries:
                raise CheckpointError(
                    f"tensor {name} is in both {entries[name].file} and {file}; remove the stale file"
                )
            entries[name] = entry
    if not (path / SINGLE_FILE).is_file() and (path / INDEX_FILE).is_file():
        _check_index(path, entries)
    return split_experts(text_part(entries))


def _check_index(path: Path, entries: dict[str, TensorEntry]) -> None:
    """Every tensor that the index names is where the index says."""
    for name, file in weight_map_of(path / INDEX_FILE).items():
        if name not in entries or entries[name].file.name != file:
            raise CheckpointError(f"tensor {name} is not in {path / file}, where {INDEX_FILE} says it is")
