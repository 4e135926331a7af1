"""One request's way from the receiver of a core's outputs to its reader."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ..outputs import SampleDelta


class RequestStream:
    """An asynchronous iterator over one request's deltas, at most one waiting per sample.

    A delta whose forerunner has not been read yet is joined to it, so a slow reader costs no more memory than the
    request's whole output and gets fewer, longer deltas. Closing an unfinished stream aborts the request; whoever
    takes a stream closes it (``contextlib.aclosing``, or ``try``/``finally``). One reader only.
    """

    def __init__(self, request_id: str, num_samples: int, on_end: Callable[[RequestStream], None]) -> None:
        self.request_id = request_id
        self._waiting: dict[int, SampleDelta] = {}
        self._num_open = num_samples
        self._error: Exception | None = None
        self._closed = False
        self._reader: asyncio.Future[None] | None = None
        self._consumer: Callable[[SampleDelta], bool] | None = None
        self._on_end = on_end

    @property
    def is_finished(self) -> bool:
        """True once every sample's last delta has come."""
        return self._num_open == 0

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> SampleDelta:
        while self._error is None and not self._waiting:
            if self._closed or self.is_finished:
                raise StopAsyncIteration
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        if self._error is not None:
            raise self._error
        return self._waiting.pop(next(iter(self._waiting)))

    def divert(self, consumer: Callable[[SampleDelta], bool]) -> None:
        """Offer deltas to ``consumer`` as they come, without a turn of the loop; those it takes (True) are read.

        Only while the reader has read all before and waits; last deltas are always the reader's. An error that
        ``consumer`` raises is the reader's as well.
        """
        self._consumer = consumer

    async def aclose(self) -> None:
        """End the stream for its reader; aborts what is unfinished."""
        self.close()

    def close(self) -> None:
        """`aclose` without waiting, which it never does."""
        self._waiting.clear()
        self._end()

    def put(self, delta: SampleDelta) -> None:
        """Add one delta; the producer's side."""
        if self._consumer is not None and delta.finish_reason is None and self._is_read:
            try:
                if self._consumer(delta):
                    return
            except Exception as error:
                self.fail(error)
                return
        if delta.index in self._waiting:
            self._waiting[delta.index].extend(delta)
        else:
            self._waiting[delta.index] = delta
        if delta.finish_reason is not None:
            self._num_open -= 1
        if self.is_finished:
            self._end()
        self._wake()

    def fail(self, error: Exception) -> None:
        """Raise ``error`` for the reader at once, before what waits; no effect on a stream that has ended."""
        if not self._closed:
            self._error = error
            self._end()

    @property
    def _is_read(self) -> bool:
        return self._reader is not None and not self._reader.done()

    def _end(self) -> None:
        if not self._closed:
            self._closed = True
            self._on_end(self)
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
