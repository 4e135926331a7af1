"""Writes a checkpoint of safetensors files tensor by tensor, in any order, without holding it in memory.

All shapes are known before the first tensor is made, so the headers go first and each tensor has its place. Widest
elements come first, as in the safetensors library's own files, which keeps every tensor aligned.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..storage import allocate

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
INDEX_FILE = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor to come."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class _Place:
    spec: TensorSpec
    file: Path
    offset: int


class TensorWriter:
    """``with TensorWriter(folder, specs, max_shard_bytes) as writer: writer.write(name, tensor)``.

    Leaving the block without an error checks that every tensor was written, once. ``done`` are names that an earlier
    writer of the same tensors in the same folder has written.
    """

    def __init__(self, folder: Path, specs: list[TensorSpec], max_shard_bytes: int, done: Collection[str] = ()) -> None:
        self.folder = folder
        self.total_bytes = sum(spec.nbytes for spec in specs)
        self._places: dict[str, _Place] = {}
        self._files: dict[Path, BinaryIO] = {}
        self._missing = {spec.name for spec in specs} - set(done)
        self._goes_on = bool(done)
        shards = _assign(specs, max_shard_bytes)
        for number, shard in enumerate(shards, 1):
            single = len(shards) == 1
            name = "model.safetensors" if single else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            self._start(folder / name, shard)
        if len(shards) > 1:
            self._write_index()

    def write(self, name: str, tensor: Tensor) -> None:
        """Store one tensor at its place; dtype and shape must be the announced ones."""
        place = self._places[name]
        assert name in self._missing, f"{name} is written twice"
        assert (tensor.dtype, tuple(tensor.shape)) == (place.spec.dtype, place.spec.shape), f"{name} changed its form"
        stream = self._files[place.file]
        stream.seek(place.offset)
        stream.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        self._missing.discard(name)

    def flush(self) -> None:
        """Hand everything written so far to the operating system."""
        for stream in self._files.values():
            stream.flush()

    def __enter__(self) -> TensorWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for stream in self._files.values():
            stream.close()
        if kind is None and self._missing:
            raise CheckpointError(f"{len(self._missing)} tensors were not written, such as {min(self._missing)}")

    def _start(self, file: Path, specs: list[TensorSpec]) -> None:
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offsets: dict[str, int] = {}
        end = 0
        for spec in sorted(specs, key=lambda spec: (-spec.dtype.itemsize, spec.name)):
            offsets[spec.name], end = end, end + spec.nbytes
            header[spec.name] = {
                "dtype": DTYPE_NAMES[spec.dtype],
                "shape": list(spec.shape),
                "data_offsets": [offsets[spec.name], end],
            }
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        stream = file.open("r+b" if self._goes_on else "wb")
        self._files[file] = stream
        stream.write(struct.pack("<Q", len(text)) + text)
        allocate(stream, 8 + len(text) + end)
        self._places.update({spec.name: _Place(spec, file, 8 + len(text) + offsets[spec.name]) for spec in specs})

    def _write_index(self) -> None:
        index = {
            "metadata": {"total_size": self.total_bytes},
            "weight_map": {name: place.file.name for name, place in sorted(self._places.items())},
        }
        (self.folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")


def _assign(specs: list[TensorSpec], max_shard_bytes: int) -> list[list[TensorSpec]]:
    """Cut the list, in its order, into shards of at most ``max_shard_bytes`` (one tensor at least)."""
    shards: list[list[TensorSpec]] = [[]]
    size = 0
    for spec in specs:
        if shards[-1] and size + spec.nbytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(spec)
        size += spec.nbytes
    return shards
