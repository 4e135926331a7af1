"""Memory for packed weights, in 2 MiB pages where the system grants them.

A step reads every weight once, so with 4 KiB pages it misses the TLB once per page and the prefetchers stop at each
page's end. Weights are carved out of large chunks, because one alone would often not fill a large page. A chunk lives
as long as a weight in it.
"""

from __future__ import annotations

import math
import threading

import torch
from torch import Tensor

from .library import library

_PAGE = 2 << 20
_CHUNK = 32 * _PAGE
_ALIGNMENT = 256

_lock = threading.Lock()
_rest = torch.empty(0, dtype=torch.uint8)


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An uninitialized contiguous tensor, aligned to 256 bytes."""
    global _rest
    num_bytes = math.prod(shape) * dtype.itemsize
    taken = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
    with _lock:
        if taken > _CHUNK // 2:
            area = _allocate(taken)
        else:
            if taken > len(_rest):
                _rest = _allocate(_CHUNK)
            area, _rest = _rest[:taken], _rest[taken:]
    return area[:num_bytes].view(dtype).view(shape)


def _allocate(num_bytes: int) -> Tensor:
    """Bytes from a page's start on; pages that nobody writes to are never backed."""
    area = torch.empty(num_bytes + _PAGE, dtype=torch.uint8)
    area = area[-area.data_ptr() % _PAGE :][:num_bytes]
    library().twofold_advise_large_pages(area.data_ptr(), num_bytes)
    return area
