"""The header of a safetensors file, checked against the file's size before any tensor is read."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path

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
            header = json.loads(stream.read(length))
        except ValueError:
            raise CheckpointError(f"the header of {file} is not JSON; the file is damaged") from None
    data = 8 + length
    entries = {
        name: TensorEntry(file, row["dtype"], tuple(row["shape"]), *(data + offset for offset in row["data_offsets"]))
        for name, row in header.items()
        if name != "__metadata__"
    }
    _check_size(file, size, entries)
    return entries


def _check_size(file: Path, size: int, entries: dict[str, TensorEntry]) -> None:
    cut = [name for name, entry in entries.items() if entry.end > size]
    if cut:
        more = f" and {len(cut) - 1} more" if len(cut) > 1 else ""
        raise CheckpointError(
            f"{file} is cut off at {size} of {max(entry.end for entry in entries.values())} bytes; "
            f"tensor {cut[0]}{more} cannot be read: fetch the file again"
        )
