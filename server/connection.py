"""One connection, bounded: a head's size and time, idle time, readers that read nothing, and how many there are."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from ..errors import EngineBusyError
from .errors import INVALID_REQUEST, ErrorReply, error_reply
from .sse import CHUNK_WRITER

# A parser without a limit of its own would take a head of any size.
MAX_HEAD_BYTES = 64 << 10
MAX_HEADERS = 100
KEEP_ALIVE_SECONDS = 65
STALL_SECONDS = 120.0
# A client that is still sending when it is refused gets so long to see the answer: an end at once would be a reset,
# which destroys what it has not read yet.
_LINGER_SECONDS = 2.0

_REASONS = {400: b"Bad Request", 408: b"Request Timeout", 431: b"Request Header Fields Too Large"}


@dataclass(slots=True)
class ConnectionLimits:
    """What the connections of one server share. ``idle`` are those without a whole request head, longest first."""

    max_connections: int
    head_seconds: float
    idle_seconds: float = KEEP_ALIVE_SECONDS
    stall_seconds: float = STALL_SECONDS
    idle: dict[BoundedConnection, None] = field(default_factory=dict)


def bounded_connection(limits: ConnectionLimits) -> type[BoundedConnection]:
    """The protocol class for a server with these limits."""
    return type("BoundedConnection", (BoundedConnection,), {"limits": limits})


class BoundedConnection(HttpToolsProtocol):
    """uvicorn's protocol with limits.

    One connection too many ends the one that has been idle longest, or is itself told 503 where none is idle. A head
    that is too large gets 431, one that comes too slowly 408; a client that reads nothing of its answer is cut off.
    """

    limits: ConnectionLimits

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._in_head = False
        self._head_size = 0
        self._lingers = False
        self._timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        limits = self.limits
        if len(self.connections) > limits.max_connections:
            oldest = next(iter(limits.idle), None)
            if oldest is None:
                message = f"{limits.max_connections} connections are open, the most that are taken; try again later"
                self._refuse(error_reply(EngineBusyError(message)))
                return
            oldest._end()
        limits.idle[self] = None
        self._timer = self.loop.call_later(limits.idle_seconds, self._end)

    def connection_lost(self, exc: Exception | None) -> None:
        self._leave_idle()
        self._unset_stall_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._lingers:
            return
        was_in_head = self._in_head
        super().data_received(data)
        if self.transport.is_closing() or self._lingers:
            return
        if not self._in_head:
            if self._timer is None and not self._is_answering:
                self._timer = self.loop.call_later(self.limits.idle_seconds, self._end)
        elif was_in_head:
            self._head_size += len(data)
            if self._head_size > MAX_HEAD_BYTES:
                self._refuse(_head_too_large())
        elif not self._is_answering:
            self._unset_timer()
            self._timer = self.loop.call_later(self.limits.head_seconds, self._head_too_slow)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self._head_size = 0

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._leave_idle()
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        app = self.app
        if size > MAX_HEAD_BYTES or len(self.headers) > MAX_HEADERS:
            self.app = _refusing(_head_too_large())
            # The parser of URLs gives up long ones by itself, with another status.
            self.url = b"/"
        try:
            super().on_headers_complete()
        finally:
            self.app = app
        scope: dict[str, Any] = self.cycle.scope  # type: ignore[assignment]
        scope[CHUNK_WRITER] = _chunk_writer(self.cycle, self.transport)
        self.cycle.transport = _CycleTransport(self.transport, self._close)  # type: ignore[assignment]

    def eof_received(self) -> None:
        if self._lingers:
            self.transport.close()

    def on_response_complete(self) -> None:
        if self._lingers:
            return
        super().on_response_complete()
        if not self.transport.is_closing() and not self._is_answering:
            self.limits.idle[self] = None

    def send_400_response(self, msg: str) -> None:
        self._refuse(
            ErrorReply(
                400,
                "this is no HTTP/1.1 request: its first line, a header or the Content-Length is wrong",
                INVALID_REQUEST,
                code="bad_request",
            )
        )

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unset_stall_timer()
        self._stall_timer = self.loop.call_later(self.limits.stall_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unset_stall_timer()

    def _head_too_slow(self) -> None:
        message = f"the request's headers did not arrive within {self.limits.head_seconds:g} s"
        self._refuse(ErrorReply(408, message, INVALID_REQUEST, code="request_timeout"))

    def _refuse(self, reply: ErrorReply) -> None:
        """Say what is wrong where no answer has begun, and close."""
        self._leave_idle()
        if not self._is_answering or not self.cycle.response_started:
            body = reply.encode()
            reason = _REASONS.get(reply.status, b"Service Unavailable")
            lines = [b"HTTP/1.1 %d %s" % (reply.status, reason), b"content-type: application/json"]
            lines += [f"{name.lower()}: {value}".encode() for name, value in reply.headers.items()]
            lines += [b"content-length: %d" % len(body), b"connection: close", b"", body]
            self.transport.write(b"\r\n".join(lines))
        self._linger()

    def _close(self) -> None:
        """The answer is complete and says that the connection ends with it."""
        if self.cycle.more_body:
            self._linger()
        else:
            self.transport.close()

    def _linger(self) -> None:
        """Nothing more is sent; what the client still sends is read and dropped for a while."""
        if self._lingers or self.transport.is_closing():
            return
        if not self.transport.can_write_eof():
            self.transport.close()
            return
        self._lingers = True
        self._unset_timer()
        self._unset_keepalive_if_required()
        self.transport.write_eof()
        self.flow.resume_reading()
        self._timer = self.loop.call_later(_LINGER_SECONDS, self.transport.close)

    def _end(self) -> None:
        self._leave_idle()
        self.transport.close()

    def _leave_idle(self) -> None:
        self.limits.idle.pop(self, None)
        self._unset_timer()

    def _unset_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _unset_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None


class _CycleTransport:
    """What uvicorn's cycle of one request sees of its transport: closing waits for a client that is still sending."""

    __slots__ = ("close", "is_closing", "write")

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self.write = transport.write
        self.is_closing = transport.is_closing
        self.close = close


def _chunk_writer(cycle: RequestResponseCycle, transport: asyncio.Transport) -> Callable[[bytes], bool]:
    """Writes a chunk of the cycle's body at once; does nothing and says False where that is not possible now.

    A client that reads too slowly makes the transport pause the writing, so what waits for it stays bounded.
    """
    flow, write = cycle.flow, transport.write

    def write_chunk(payload: bytes) -> bool:
        if flow.write_paused or cycle.disconnected or cycle.response_complete or not cycle.chunked_encoding:
            return False
        write(b"%x\r\n%b\r\n" % (len(payload), payload))
        return True

    return write_chunk


def _head_too_large() -> ErrorReply:
    message = f"the request's headers exceed {MAX_HEAD_BYTES} bytes or {MAX_HEADERS} lines"
    return ErrorReply(431, message, INVALID_REQUEST, code="headers_too_large", headers={"Connection": "close"})


def _refusing(reply: ErrorReply) -> Any:
    app: ASGIApp = reply.response()
    return app
