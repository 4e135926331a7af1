"""The gguf package's reader, without an object for each string of a vocabulary and with pages that can be let go."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFEndian, GGUFReader, GGUFValueType, ReaderField

from .file_pages import let_go
from .gguf_header import check_tensors

_STRINGS = [GGUFValueType.ARRAY, GGUFValueType.STRING]


class Reader(GGUFReader):
    """Reads through a plain view of the mapped file: slicing numpy's memmap class costs three times as much."""

    @property  # type: ignore[override]
    def data(self) -> np.ndarray:
        return self._data

    @data.setter
    def data(self, value: np.memmap) -> None:
        self._path = Path(str(value.filename))
        self._mapping: mmap.mmap = value._mmap  # type: ignore[attr-defined]
        self._data = np.asarray(value)

    def contents(self, key: str) -> Any:
        """The metadata value of a key that is there: a number, a string, a bool or a list of them."""
        field = self.fields[key]
        return self._strings(field.parts[-1].tobytes()) if field.types == _STRINGS else field.contents()

    def let_go(self, start: int, end: int) -> None:
        """Drop the pages of bytes ``start`` to ``end`` from this process; the system still has them in its cache."""
        let_go(self._mapping, start // mmap.PAGESIZE * mmap.PAGESIZE, end)

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[GGUFValueType]]:
        """An array is one part, one of strings its bytes: the package makes two views for each string."""
        if raw_type != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        kind, count = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)
        item, length, first = GGUFValueType(kind[0]), int(count[0]), orig_offs + 12
        if item is GGUFValueType.ARRAY or not length:
            return super()._get_field_parts(orig_offs, raw_type)
        if item is GGUFValueType.STRING:
            part = self.data[first : self._end_of_strings(first, length)]
        else:
            part = self._get(first, self.gguf_scalar_to_np[item], length)
            if len(part) < length:
                raise IndexError(f"an array of {length} values is cut off")
        return 12 + int(part.nbytes), [kind, count, part], [2], [GGUFValueType.ARRAY, item]

    def _build_tensors(self, start_offs: int, fields: list[ReaderField]) -> None:
        check_tensors(self._path, self._data.size, start_offs, int(self.alignment), fields)
        super()._build_tensors(start_offs, fields)

    def _end_of_strings(self, first: int, count: int) -> int:
        """Where ``count`` strings end, each a length of 8 bytes and its text."""
        read, view, size = self._length.unpack_from, self._data.data, self._data.size
        for _ in range(count):
            if first + 8 > size:
                raise IndexError(f"a list of {count} strings is cut off")
            first += 8 + read(view, first)[0]
        if first > size:
            raise IndexError(f"a list of {count} strings is cut off")
        return first

    def _strings(self, raw: bytes) -> list[str]:
        texts, first = [], 0
        while first < len(raw):
            end = first + 8 + self._length.unpack_from(raw, first)[0]
            texts.append(str(raw[first + 8 : end], encoding="utf-8"))
            first = end
        return texts

    @property
    def _length(self) -> struct.Struct:
        return struct.Struct("<Q" if self.endianess == GGUFEndian.LITTLE else ">Q")
