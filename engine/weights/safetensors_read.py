"""Reading tensors' data from safetensors files: as mappings, from which they are packed without a copy, or read.

Pages of a mapped file count as this process's memory, so those of rows that were used are let go at once. Small tensors
are read: a mapping would cost more. So is everything where a file system maps nothing.
"""

from __future__ import annotations

import io
import math
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
from torch import Tensor

from ...errors import CheckpointError
from .file_pages import let_go, rows_at_once
from .safetensors_header import DTYPES, TensorEntry

# Bytes of rows that are handed out at once: read ones are still in the cache when they are converted.
CHUNK_BYTES = 2 << 20
MAPPED_CHUNK_BYTES = 4 << 20
# Tensors from this size on are mapped.
MAPPED_BYTES = 1 << 20
# What the system is asked to fetch while a tensor is being converted; files hold a layer's tensors side by side.
AHEAD_BYTES = 32 << 20

_kept_buffers: list[Tensor] = []


def read_tensor(name: str, entry: TensorEntry) -> Tensor:
    """A tensor's data in memory of its own, a large one's as pages of the file that become its own when it is written
    to; ``entry.dtype`` is one of ``DTYPES``."""
    size = _checked_size(name, entry)
    mapped = map_tensor(name, entry) if size >= MAPPED_BYTES else None
    if mapped is not None:
        return mapped
    data = torch.empty(size, dtype=torch.uint8)
    with _open_at(entry, entry.start) as stream:
        _fill(name, entry, stream, data)
    return data.view(DTYPES[entry.dtype]).view(entry.shape)


def map_tensor(name: str, entry: TensorEntry) -> Tensor | None:
    """A view of the file, where the tensor lies as its dtype wants it; ``entry.dtype`` is one of ``DTYPES``."""
    mapping = map_file(name, entry)
    return None if mapping is None else view_of(*mapping, entry)


def read_rows(name: str, entry: TensorEntry) -> Iterator[tuple[int, Tensor]]:
    """(first row, rows) of a tensor of one or more dimensions, which are valid until the next."""
    mapping = map_file(name, entry) if entry.end - entry.start >= MAPPED_BYTES else None
    yield from _buffered_rows(name, entry) if mapping is None else _mapped_rows(*mapping, entry)


def map_file(name: str, entry: TensorEntry) -> tuple[mmap.mmap, int] | None:
    """A mapping and where the tensor begins in it. CheckpointError where the file has become shorter: its pages would
    end the process."""
    size, itemsize = _checked_size(name, entry), DTYPES[entry.dtype].itemsize
    if not size or entry.start % itemsize:
        return None
    first = entry.start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    with _open_at(entry, entry.start) as stream:
        if os.fstat(stream.fileno()).st_size < entry.end:
            raise _cut_off(name, entry)
        try:
            area = mmap.mmap(stream.fileno(), entry.end - first, access=mmap.ACCESS_COPY, offset=first)
        except (OSError, ValueError):  # a file system that maps nothing
            return None
    return area, entry.start - first


def view_of(area: mmap.mmap, offset: int, entry: TensorEntry) -> Tensor:
    """The tensor that begins so far into a mapping."""
    flat = torch.frombuffer(area, dtype=DTYPES[entry.dtype], count=math.prod(entry.shape), offset=offset)
    return flat.view(entry.shape)


def _mapped_rows(area: mmap.mmap, offset: int, entry: TensorEntry) -> Iterator[tuple[int, Tensor]]:
    tensor, num_rows = view_of(area, offset, entry), entry.shape[0]
    row_bytes = (entry.end - entry.start) // num_rows
    step = rows_at_once(MAPPED_CHUNK_BYTES, row_bytes)
    done = 0
    for first in range(0, num_rows, step):
        yield first, tensor[first : first + step]
        used = (offset + min(first + step, num_rows) * row_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        let_go(area, done, used)
        done = max(done, used)


def _buffered_rows(name: str, entry: TensorEntry) -> Iterator[tuple[int, Tensor]]:
    """Rows that are read into one buffer, each overwritten by the next."""
    size, num_rows = _checked_size(name, entry), entry.shape[0]
    row_bytes = size // max(num_rows, 1)
    step = rows_at_once(CHUNK_BYTES, row_bytes)
    with _buffer(min(step, num_rows) * row_bytes) as buffer, _open_at(entry, entry.start) as stream:
        for first in range(0, num_rows, step):
            count = min(step, num_rows - first)
            data = buffer[: count * row_bytes]
            _fill(name, entry, stream, data)
            yield first, data.view(DTYPES[entry.dtype]).view(count, *entry.shape[1:])


@contextmanager
def _buffer(num_bytes: int) -> Iterator[Tensor]:
    """At least so many bytes, which go to the next tensor afterwards: new memory would be cleared for each."""
    buffer = None
    if num_bytes <= CHUNK_BYTES:
        with suppress(IndexError):  # none is there, or another thread was quicker
            buffer = _kept_buffers.pop()
    if buffer is None:
        buffer = torch.empty(max(num_bytes, CHUNK_BYTES), dtype=torch.uint8)
    try:
        yield buffer
    finally:
        if len(buffer) == CHUNK_BYTES and not _kept_buffers:
            _kept_buffers.append(buffer)


def _checked_size(name: str, entry: TensorEntry) -> int:
    size = entry.end - entry.start
    if size != math.prod(entry.shape) * DTYPES[entry.dtype].itemsize:
        raise CheckpointError(
            f"tensor {name} in {entry.file} is {entry.dtype} {list(entry.shape)} but has {size} bytes: a damaged file"
        )
    return size


def _open_at(entry: TensorEntry, position: int) -> io.FileIO:
    stream = entry.file.open("rb", buffering=0)
    stream.seek(position)
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(stream.fileno(), position, entry.end - position + AHEAD_BYTES, os.POSIX_FADV_WILLNEED)
    return stream


def _fill(name: str, entry: TensorEntry, stream: io.FileIO, data: Tensor) -> None:
    view, done = data.numpy().data, 0
    while done < len(view):
        count = stream.readinto(view[done:])
        if not count:
            raise _cut_off(name, entry)
        done += count


def _cut_off(name: str, entry: TensorEntry) -> CheckpointError:
    return CheckpointError(f"{entry.file} was cut off while tensor {name} was being read; fetch it again")
