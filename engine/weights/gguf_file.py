"""One GGUF file: its metadata as plain Python values and its tensors, dequantized by the gguf package."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, ReaderField, ReaderTensor, dequantize
from gguf.gguf_reader import READER_SUPPORTED_VERSIONS

from ...errors import CheckpointError, UnsupportedError
from .gguf_header import check_tensors


class _Reader(GGUFReader):
    """Reads through a plain view of the mapped file: slicing numpy's memmap class costs three times as much."""

    @property  # type: ignore[override]
    def data(self) -> np.ndarray:
        return self._data

    @data.setter
    def data(self, value: np.ndarray) -> None:
        self._path = Path(value.filename)  # type: ignore[attr-defined]
        self._data = np.asarray(value)

    def _build_tensors(self, start_offs: int, fields: list[ReaderField]) -> None:
        check_tensors(self._path, self._data.size, start_offs, int(self.alignment), fields)
        super()._build_tensors(start_offs, fields)


class GgufFile:
    """Metadata under llama.cpp's key names; tensors under llama.cpp's tensor names."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            reader = _Reader(path)
        except (ValueError, IndexError, KeyError, OverflowError, MemoryError) as error:
            raise CheckpointError(_unreadable(path, error)) from None
        self._fields = reader.fields
        self.tensors: dict[str, ReaderTensor] = {tensor.name: tensor for tensor in reader.tensors}
        self._cache: dict[str, Any] = {}

    def value(self, key: str, default: Any = None) -> Any:
        """The metadata value of ``key``: a number, a string, a bool or a list of them."""
        if key not in self._fields:
            return default
        if key not in self._cache:
            self._cache[key] = self._fields[key].contents()
        return self._cache[key]

    @property
    def keys(self) -> list[str]:
        """Every metadata key, in the file's order."""
        return list(self._fields)

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

    def read(self, name: str) -> np.ndarray:
        """The tensor as float32, in memory of its own."""
        tensor = self.tensors[name]
        try:
            data = dequantize(_joined_rows(tensor.data), tensor.tensor_type)
        except NotImplementedError:
            raise UnsupportedError(
                f"tensor {name} in {self.path} has type {tensor.tensor_type.name}, which gguf cannot dequantize"
            ) from None
        # Unquantized tensors come as views of the read-only file.
        owned = data if data.dtype == np.float32 and data.flags.writeable else np.array(data, dtype=np.float32)
        return owned.reshape(self.shape(name))


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
