"""Server-sent events: one ``data:`` line per event, errors as a last event, the client's absence noticed at once."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from .errors import ErrorReply, error_reply
from .open_requests import ClientGone, OpenRequests

# In a request's scope: the way to the client past everything that only looks at the status line.
DIRECT_SEND = "twofold.direct_send"
# In a request's scope: ``write(payload) -> bool``, a chunk of the body written at once, False where it cannot be now.
CHUNK_WRITER = "twofold.chunk_writer"
DONE = b"data: [DONE]\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Proxies such as nginx would collect events otherwise.
    (b"x-accel-buffering", b"no"),
]


def event(payload: bytes) -> bytes:
    """One event of JSON bytes (which hold no line breaks)."""
    return b"data: " + payload + b"\n\n"


class TextEvent:
    """Events that differ in one text: ``make(text)`` is encoded once, and each event puts its text in that place."""

    def __init__(self, make: Callable[[str], Any]) -> None:
        mark = uuid.uuid4().hex
        before, after = msgspec.json.encode(make(mark)).split(msgspec.json.encode(mark))
        self._before, self._after = b"data: " + before, after + b"\n\n"

    def __call__(self, text: str) -> bytes:
        return self._before + msgspec.json.encode(text) + self._after


def _closed(payload: bytes) -> bool:
    return False


class EventWriter:
    """The short way of an event to its client, past all coroutines.

    ``write(payload)`` is True where the event is on its way; False before the stream has begun, where the client reads
    too slowly, and where the HTTP server has no such way: the event then goes through the stream's generator.
    """

    __slots__ = ("write",)

    def __init__(self) -> None:
        self.write: Callable[[bytes], bool] = _closed


class EventStream(Response):
    """Sends ``events``, bytes ready for the wire, then ``[DONE]``.

    The status line waits for the first event, so a request that the engine refuses is a 4xx or 5xx, no broken stream.
    An error later on is a last event ``{"error": ...}`` without ``[DONE]`` after it.
    """

    end = DONE

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        open_requests: OpenRequests,
        headers: dict[str, str],
        writer: EventWriter | None = None,
    ) -> None:
        self.status_code = 200
        self.background = None
        self._events = events
        self._open_requests = open_requests
        self._event_headers = [*_HEADERS, *((name.encode(), value.encode()) for name, value in headers.items())]
        self._started = False
        self._writer = EventWriter() if writer is None else writer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Past the status line the layers between here and the gate have nothing to do any more.
        direct: Send = scope.get(DIRECT_SEND, send)
        try:
            await self._open_requests.run(receive, self._send_events(scope, send, direct))
        except ClientGone:
            return
        except Exception as error:
            reply = error_reply(error)
            if not self._started:
                await reply.response(scope["path"])(scope, receive, send)
                return
            await direct(_body(self.error_event(reply)))
        await direct({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_events(self, scope: Scope, send: Send, direct: Send) -> None:
        async with aclosing(self._events) as events:
            async for payload in events:
                if not self._started:
                    await self._start(send)
                    self._writer.write = scope.get(CHUNK_WRITER, _closed)
                await direct(_body(payload))
        if not self._started:
            await self._start(send)
        if self.end:
            await direct(_body(self.end))

    def error_event(self, reply: ErrorReply) -> bytes:
        """The last event of a stream that fails."""
        return event(reply.encode())

    async def _start(self, send: Send) -> None:
        self._started = True
        await send({"type": "http.response.start", "status": self.status_code, "headers": self._event_headers})


class NamedEventStream(EventStream):
    """Events with names, the last of which says that it is the last: no ``[DONE]``."""

    end = b""

    def error_event(self, reply: ErrorReply) -> bytes:
        return b"event: error\n" + event(reply.encode())


def _body(payload: bytes) -> Message:
    return {"type": "http.response.body", "body": payload, "more_body": True}
