"""Reading tensors' data from safetensors files: whole, a few rows at a time through one small buffer, or as a mapping.

What becomes another layout is read and not mapped: pages of a mapped file would stay in this process's memory beside
the weights made of them.
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
from .safetensors_header import DTYPES, TensorEntry

# Bytes that are read at once where a tensor is converted row by row: they are still in the cache then.
CHUNK_BYTES = 2 << 20
# What the system is asked to fetch while a tensor is being converted; files hold a layer's tensors side by side.
AHEAD_BYTES = 32 << 20

_kept_buffers: list[Tensor] = []


def read_tensor(name: str, entry: TensorEntry) -> Tensor:
    """A tensor's data in memory of its own; ``entry.dtype`` is one of ``DTYPES``."""
    size = _checked_size(name, entry)
    data = torch.empty(size, dtype=torch.uint8)
    with _open_at(entry, entry.start) as stream:
        _fill(name, entry, stream, data)
    return data.view(DTYPES[entry.dtype]).view(entry.shape)


def map_tensor(name: str, entry: TensorEntry) -> Tensor | None:
    """A view of the file, where the tensor lies as its dtype wants it; ``entry.dtype`` is one of ``DTYPES``."""
    size, dtype = _checked_size(name, entry), DTYPES[entry.dtype]
    if not size or entry.start % dtype.itemsize:
        return None
    first = entry.start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    with _open_at(entry, entry.start) as stream:
        try:
            area = mmap.mmap(stream.fileno(), entry.end - first, access=mmap.ACCESS_COPY, offset=first)
        except (OSError, ValueError):  # a file system that maps nothing, or a file that was cut off meanwhile
            return None
    return torch.frombuffer(area, dtype=dtype, count=math.prod(entry.shape), offset=entry.start - first).view(
        entry.shape
    )


def read_rows(name: str, entry: TensorEntry) -> Iterator[tuple[int, Tensor]]:
    """(first row, rows) of a tensor of one or more dimensions; each is overwritten by the next."""
    size, num_rows = _checked_size(name, entry), entry.shape[0]
    row_bytes = size // max(num_rows, 1)
    step = max(1, CHUNK_BYTES // max(row_bytes, 1))
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
            raise CheckpointError(f"{entry.file} was cut off while tensor {name} was being read; fetch it again")
        done += count
