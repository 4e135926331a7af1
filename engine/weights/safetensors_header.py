"""The header of a safetensors file, checked against the file's size before any tensor is read."""

from __future__ import annotations

import functools
import itertools
import json
import struct
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...errors import CheckpointError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}
MAX_HEADER_BYTES = 100 << 20


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file: ``dtype`` as the file spells it; ``start`` and ``end`` are its bytes within the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def read_header(file: Path) -> dict[str, TensorEntry]:
    """Every tensor of one file. CheckpointError names the file, and a tensor whose data is cut off."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else MAX_HEADER_BYTES + 1
        if length > MAX_HEADER_BYTES or 8 + length > size:
            raise CheckpointError(f"{file} is not a safetensors file or its header is cut off ({size} bytes)")
        try:
            header = json.loads(stream.read(length), object_pairs_hook=functools.partial(_without_repeats, file))
        except ValueError:
            raise CheckpointError(f"the header of {file} is not JSON; the file is damaged") from None
    data = 8 + length
    entries = {name: _entry(file, name, row, data) for name, row in header.items() if name != "__metadata__"}
    _check_size(file, size, entries)
    _check_overlaps(file, entries)
    return entries


def _without_repeats(file: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; Python's reader keeps the last of two values under one name in silence."""
    result = dict(pairs)
    if len(result) < len(pairs):
        name = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise CheckpointError(f"tensor {name} is twice in the header of {file}: a damaged file")
    return result


def _entry(file: Path, name: str, row: Any, data: int) -> TensorEntry:
    try:
        start, end = (data + int(offset) for offset in row["data_offsets"])
        entry = TensorEntry(file, str(row["dtype"]), tuple(int(size) for size in row["shape"]), start, end)
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(f"the header of {file} does not say where tensor {name} lies: a damaged file") from None
    if not data <= start <= end or any(size < 0 for size in entry.shape):
        raise CheckpointError(
            f"tensor {name} in {file} is said to be {list(entry.shape)} at bytes {start} to {end}: a damaged file"
        )
    return entry


def _check_overlaps(file: Path, entries: dict[str, TensorEntry]) -> None:
    ordered = sorted(entries.items(), key=lambda item: (item[1].start, item[1].end))
    for (name, entry), (other, following) in itertools.pairwise(ordered):
        if following.start < entry.end and following.start < following.end:
            raise CheckpointError(f"tensors {name} and {other} in {file} share bytes: a damaged file")


def _check_size(file: Path, size: int, entries: dict[str, TensorEntry]) -> None:
    cut = [name for name, entry in entries.items() if entry.end > size]
    if cut:
        more = f" and {len(cut) - 1} more" if len(cut) > 1 else ""
        raise CheckpointError(
            f"{file} is cut off at {size} of {max(entry.end for entry in entries.values())} bytes; "
            f"tensor {cut[0]}{more} cannot be read: fetch the file again"
        )
