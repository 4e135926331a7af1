"""The requests being answered: ended when their client goes away, or with an error when the server has to stop."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from ..errors import TwofoldError

T = TypeVar("T")


class ClientGone(Exception):
    """The client hung up; there is nobody to answer."""


class RequestTimeoutError(TwofoldError):
    """An answer took longer than the server allows (HTTP 504)."""


class OpenRequests:
    """Runs the work of each request as a task of its own, so that it can be cancelled from outside.

    ``seconds`` is the longest that any may take, None for no limit.
    """

    def __init__(self, seconds: float | None = None) -> None:
        self._seconds = seconds
        self._tasks: set[asyncio.Task[Any]] = set()
        self._error: Exception | None = None

    def __len__(self) -> int:
        return len(self._tasks)

    async def run(self, receive: Receive, work: Coroutine[Any, Any, T]) -> T:
        """The result of ``work``. ClientGone when the client hangs up first; the error of `interrupt` after one;
        RequestTimeoutError where the work takes more than ``seconds``.
        """
        task = asyncio.ensure_future(work)
        watcher = asyncio.ensure_future(_disconnected(receive))
        self._tasks.add(task)
        try:
            await asyncio.wait((task, watcher), timeout=self._seconds, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                if watcher.done():
                    raise ClientGone
                raise RequestTimeoutError(f"the answer took longer than {self._seconds:g} s, the most that it may")
            if task.cancelled() and self._error is not None:
                raise self._error
            return task.result()
        finally:
            self._tasks.discard(task)
            watcher.cancel()
            if not task.done():
                task.cancel()
                # The engine's iterators close, and so abort, before this request counts as gone.
                await asyncio.wait((task,))

    def interrupt(self, error: Exception) -> None:
        """End all open work; its clients are told ``error``."""
        self._error = error
        for task in self._tasks:
            task.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
