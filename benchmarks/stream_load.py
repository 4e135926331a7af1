"""Many streams read by one cheap loop: raw sockets and epoll, so that the readers leave the machine to the server."""

from __future__ import annotations

import json
import select
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class StreamResult:
    """One stream as its reader saw it: seconds from sending to the first text, and how many events and bytes came."""

    first: float = 0.0
    events: int = 0
    size: int = 0
    complete: bool = False


def read_streams(
    port: int,
    path: str,
    bodies: list[dict[str, object]],
    marker: bytes,
    mark: Callable[[int], None] | None = None,
    rest: float = 0.0,
) -> list[StreamResult]:
    """Send all bodies at once, a connection each, and read to the end; ``marker`` is in the first event with text.

    ``mark`` is told the number of events so far when every stream has had its first, and when one has ended.
    From the first mark on the reader rests ``rest`` seconds between two looks, so that it takes less of a processor.
    """
    num_waiting = len(bodies)
    poll = select.epoll()
    open_streams: dict[int, tuple[socket.socket, StreamResult, float]] = {}
    results = []
    for body in bodies:
        connection = _connect(port)
        result = StreamResult()
        open_streams[connection.fileno()] = connection, result, time.perf_counter()
        results.append(result)
        connection.sendall(request_bytes(path, body))
        connection.setblocking(False)
        poll.register(connection.fileno(), select.EPOLLIN)
    while open_streams:
        if rest and num_waiting == 0:
            time.sleep(rest)
        for descriptor, _ in poll.poll():
            connection, result, began = open_streams[descriptor]
            data = connection.recv(1 << 16)
            if not data:
                if len(open_streams) == len(bodies) and mark is not None:
                    mark(sum(item.events for item in results))
                poll.unregister(descriptor)
                del open_streams[descriptor]
                connection.close()
                continue
            if not result.first and marker in data:
                result.first = time.perf_counter() - began
                num_waiting -= 1
                if num_waiting == 0 and mark is not None:
                    mark(sum(item.events for item in results))
            result.events += data.count(b"data: {")
            result.size += len(data)
            result.complete = b"data: [DONE]" in data or result.complete
    poll.close()
    return results


def request_bytes(path: str, body: dict[str, object]) -> bytes:
    """A POST that closes its connection."""
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(content)}\r\n\r\n"
    return head.encode() + content


def _connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=60)
