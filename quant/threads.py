"""A thread pool whose workers compute with one torch thread each."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch


@contextmanager
def single_threaded_pool() -> Iterator[ThreadPoolExecutor]:
    """As many workers as torch has threads now; torch's own setting is the same afterwards."""
    num_threads = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(num_threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            yield pool
    finally:
        torch.set_num_threads(num_threads)
