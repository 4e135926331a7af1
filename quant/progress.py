"""Progress over decoder layers or the like, on the error stream: a bar in a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

SECONDS_BETWEEN_LINES = 5.0


@contextmanager
def layer_progress(title: str, unit: str = "layers") -> Iterator[Callable[[int, int], None]]:
    """Yields ``progress(done, total)``; nothing is shown before its first call.

    Where the stream is not a terminal, a line tells the start, the end, and where it is every few seconds.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Lines(title, unit)
        return
    with ExitStack() as stack:
        yield _Bar(title, unit, console, stack)


class _Bar:
    def __init__(self, title: str, unit: str, console: Console, stack: ExitStack) -> None:
        self._title = title
        self._unit = unit
        self._console = console
        self._stack = stack
        self._bar: Progress | None = None

    def __call__(self, done: int, total: int) -> None:
        if self._bar is None:
            layers = (MofNCompleteColumn(), TextColumn(self._unit), TimeElapsedColumn(), TimeRemainingColumn())
            bar = Progress(TextColumn("{task.description}"), BarColumn(), *layers, console=self._console)
            self._bar = self._stack.enter_context(bar)
            self._bar.add_task(self._title, total=total)
        self._bar.update(self._bar.task_ids[0], completed=done, total=total)


class _Lines:
    def __init__(self, title: str, unit: str) -> None:
        self._title = title
        self._unit = unit
        self._started = time.monotonic()
        self._last: float | None = None
        self._shown = -1

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        due = self._last is None or now - self._last >= SECONDS_BETWEEN_LINES
        if done == self._shown or not (due or done == total):
            return
        self._last, self._shown = now, done
        print(f"{self._title}: {done}/{total} {self._unit}, {now - self._started:.0f} s", file=sys.stderr, flush=True)
