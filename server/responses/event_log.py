"""The events of a streamed response in the background: clients come, go, and come back where they were."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence


class EventLog:
    """Events in order, number ``i`` at place ``i``, ready for the wire. Grows until `close`."""

    def __init__(self) -> None:
        self.events: list[bytes] = []
        self._closed = False
        self._changed = asyncio.Event()

    def extend(self, events: Iterable[bytes]) -> None:
        """Take in events and wake those who follow."""
        self.events += events
        self._wake()

    def close(self) -> None:
        """No more events come."""
        self._closed = True
        self._wake()

    async def follow(self, starting_after: int = -1) -> AsyncGenerator[bytes, None]:
        """All events with greater numbers, as they come, until the log is closed."""
        place = max(0, starting_after + 1)
        while True:
            changed = self._changed
            for event in self.events[place:]:
                place += 1
                yield event
            if place >= len(self.events):
                if self._closed:
                    return
                if changed is self._changed:
                    await changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


async def replay(events: Sequence[bytes], starting_after: int = -1) -> AsyncGenerator[bytes, None]:
    """The events of a response that has ended."""
    for event in events[max(0, starting_after + 1) :]:
        yield event
