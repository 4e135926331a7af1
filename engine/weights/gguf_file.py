"""One GGUF file: its metadata as plain Python values and its tensors, dequantized by the gguf package."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
from gguf import ReaderTensor, dequantize
from gguf.gguf_reader import READER_SUPPORTED_VERSIONS

from ...errors import CheckpointError, UnsupportedError
from .gguf_reader import Reader


class GgufFile:
    """Metadata under llama.cpp's key names; tensors under llama.cpp's tensor names."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._reader = Reader(path)
        except (ValueError, IndexError, KeyError, OverflowError, MemoryError) as error:
            raise CheckpointError(_unreadable(path, error)) from None
        self.tensors: dict[str, ReaderTensor] = {tensor.name: tensor for tensor in self._reader.tensors}

    def value(self, key: str, default: Any = None) -> Any:
        """The metadata value of ``key``: a number, a string, a bool or a list of them."""
        return self._reader.contents(key) if key in self._reader.fields else default

    @property
    def keys(self) -> list[str]:
        """Every metadata key, in the file's order."""
        return list(self._reader.fields)

    def require(self, key: str) -> Any:
        """Like ``value``, for keys without which the file cannot be understood."""
        value = self.value(key)
        if value is None:
            raise CheckpointError(f"{self.path} has no {key} in its metadata")
        return value

    @property
    def architecture(self) -> str:
        return str(self.require("general.architecture"))

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape in the row-major order of torch; GGUF lists the fastest dimension first."""
        return tuple(int(size) for size in reversed(self.tensors[name].shape))

    def read(self, name: str, rows: slice = slice(None)) -> np.ndarray:
        """The tensor, or some rows of it, as float32 in memory of its own."""
        tensor = self.tensors[name]
        stored = tensor.data[rows]
        try:
            data = dequantize(_joined_rows(stored), tensor.tensor_type)
        except NotImplementedError:
            raise UnsupportedError(
                f"tensor {name} in {self.path} has type {tensor.tensor_type.name}, which gguf cannot dequantize"
            ) from None
        # Unquantized tensors come as views of the read-only file.
        owned = data if data.dtype == np.float32 and data.flags.writeable else np.array(data, dtype=np.float32)
        shape = self.shape(name)
        return owned.reshape(len(stored), *shape[1:]) if shape else owned.reshape(shape)

    def let_go(self, name: str, first_row: int, end_row: int) -> None:
        """Drop the pages of rows that were used from this process."""
        tensor = self.tensors[name]
        row_bytes = tensor.n_bytes // max(len(tensor.data), 1)
        start = int(tensor.data_offset)
        self._reader.let_go(start + first_row * row_bytes, start + end_row * row_bytes)

    def let_go_all(self) -> None:
        """Drop all of the file's pages from this process."""
        self._reader.let_go(0, self._reader.data.size)


def _unreadable(path: Path, reason: Exception) -> str:
    """What is wrong with a file that the reader gave up on; its own words are mostly about arrays."""
    size = path.stat().st_size
    with path.open("rb") as stream:
        magic, version = stream.read(4), int.from_bytes(stream.read(4), "little")
    if magic not in (b"GGUF", b"FUGG"):
        return f"{path} is not a GGUF file: it begins with {magic!r} ({size} bytes); fetch it again"
    versions = ", ".join(map(str, READER_SUPPORTED_VERSIONS))
    if size >= 8 and version & 0xFFFF and version not in READER_SUPPORTED_VERSIONS:
        return (
            f"{path} says it is GGUF version {version}; read are {versions}. Convert the model again with a current "
            f"llama.cpp, or fetch the file again if it should be one of these"
        )
    if isinstance(reason, KeyError):
        return f"the metadata of {path} cannot be read ({reason.args[0]}): a damaged file, fetch it again"
    return f"the header of {path} is cut off or damaged ({size} bytes); fetch the file again"


def _joined_rows(data: np.ndarray) -> np.ndarray:
    """Eight rows as one where possible: the package takes 16 at a time, too few for numpy to be fast."""
    return data.reshape(data.shape[0] // 8, -1) if data.ndim == 2 and data.shape[0] % 8 == 0 else data


def open_gguf(path: Path) -> GgufFile:
    """The file, parsed once per process while it stays the same."""
    status = path.stat()
    return _open_cached(path, status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=2)
def _open_cached(path: Path, mtime_ns: int, size: int) -> GgufFile:
    return GgufFile(path)
