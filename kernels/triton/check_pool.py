"""Run compilations side by side, a forked process each: a compiler that crashes or hangs costs only its own case."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any


@dataclass(frozen=True, slots=True)
class _Running:
    index: int
    process: BaseProcess
    deadline: float


def run_forked(
    work: Callable[[Any], Any], items: Sequence[Any], num_jobs: int, timeout: float
) -> Iterator[tuple[int, Any, str | None]]:
    """(index, result, error) of ``work(item)`` for every item, as they finish; ``timeout`` in seconds for each."""
    context = multiprocessing.get_context("fork")
    pending = iter(enumerate(items))
    running: dict[Connection, _Running] = {}
    try:
        while True:
            while len(running) < num_jobs and (entry := next(pending, None)) is not None:
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(target=_child, args=(work, entry[1], sender))
                process.start()
                sender.close()
                running[receiver] = _Running(entry[0], process, time.monotonic() + timeout)
            if not running:
                return
            ready = wait(list(running), timeout=1.0)
            late = [pipe for pipe, job in running.items() if pipe not in ready and time.monotonic() > job.deadline]
            for pipe in [*ready, *late]:
                assert isinstance(pipe, Connection)
                job = running.pop(pipe)
                yield (job.index, *_collect(pipe, job, timed_out=pipe in late))
    finally:
        for job in running.values():
            job.process.kill()


def _child(work: Callable[[Any], Any], item: Any, sender: Connection) -> None:
    try:
        sender.send((work(item), None))
    except Exception as error:  # the parent reports it as this case's outcome
        sender.send((None, f"{type(error).__name__}: {error}"))


def _collect(pipe: Connection, job: _Running, *, timed_out: bool) -> tuple[Any, str | None]:
    if timed_out:
        job.process.kill()
        result: tuple[Any, str | None] = (None, "timed out")
    else:
        try:
            result = pipe.recv()
        except EOFError:
            result = (None, "")
    job.process.join()
    pipe.close()
    if result == (None, ""):
        return None, f"the compiler ended with exit code {job.process.exitcode}"
    return result
