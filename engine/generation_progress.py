"""The progress bar of offline generation."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from .outputs import SampleDelta


class GenerationProgress:
    """Requests done and tokens a second, on standard error; silent with ``show=False``."""

    def __init__(self, num_requests: int, *, show: bool = True) -> None:
        self._progress = Progress(
            TextColumn("Generating"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rates]}"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            disable=not show,
        )
        self._task = self._progress.add_task("", total=num_requests, rates="")
        self._began = time.monotonic()
        self._started: set[str] = set()
        self._num_prompt_tokens = 0
        self._num_tokens = 0

    def __enter__(self) -> GenerationProgress:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def update(self, deltas: list[SampleDelta], num_done: int) -> None:
        """Count what one step brought; ``num_done`` requests have finished so far."""
        for delta in deltas:
            self._num_tokens += len(delta.token_ids)
            if delta.request_id not in self._started:
                self._started.add(delta.request_id)
                self._num_prompt_tokens += delta.num_prompt_tokens
        seconds = max(time.monotonic() - self._began, 1e-9)
        rates = f"{self._num_prompt_tokens / seconds:.0f} tok/s in, {self._num_tokens / seconds:.0f} tok/s out"
        self._progress.update(self._task, completed=num_done, rates=rates)
