"""A thread pool whose workers compute with one torch thread each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

Result = TypeVar("Result")
# Elements worked on at once.
CHUNK = 1 << 17


@contextmanager
def single_threaded_pool() -> Iterator[ThreadPoolExecutor]:
    """As many workers as torch has threads now; torch's own setting is the same afterwards."""
    num_threads = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(num_threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            yield pool
    finally:
        torch.set_num_threads(num_threads)


def over_rows(compute: Callable[[slice], Result], rows: int, columns: int, *, at_once: int = CHUNK) -> list[Result]:
    """What ``compute`` makes of some rows of a matrix at a time, in order, each part on one thread.

    Parts are so small that temporaries stay in the caches, and come from the heap instead of the operating system. They
    run in inference mode where the caller does.
    """
    step = max(1, at_once // columns)
    parts = [slice(first, min(first + step, rows)) for first in range(0, rows, step)]
    without_gradients = torch.is_inference_mode_enabled()

    def one(part: slice) -> Result:
        # The mode belongs to a thread.
        with torch.inference_mode(without_gradients):
            return compute(part)

    if len(parts) == 1 or torch.get_num_threads() == 1:
        return [compute(part) for part in parts]
    with single_threaded_pool() as pool:
        return list(pool.map(one, parts))
