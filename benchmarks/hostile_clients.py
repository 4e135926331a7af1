"""Clients that a server must survive: raw sockets, many at once, none of them polite."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from stream_load import request_bytes

COMPLETIONS = "/v1/completions"
SECRET_KEY = "sk-robustness-3f1b"
AUTHORIZATION = f"Authorization: Bearer {SECRET_KEY}\r\n"


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": "replay", "prompt": "hello", "max_tokens": 3, **fields}


def post(content: bytes, headers: str = "", path: str = COMPLETIONS, length: int | None = None) -> bytes:
    """A request's bytes; ``length`` is what it claims instead of the truth."""
    size = len(content) if length is None else length
    fixed = f"POST {path} HTTP/1.1\r\nHost: x\r\n{AUTHORIZATION}Connection: close\r\n"
    return f"{fixed}{headers}Content-Length: {size}\r\n\r\n".encode() + content


def get(path: str, headers: str = "") -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: x\r\n{AUTHORIZATION}Connection: close\r\n{headers}\r\n".encode()


async def ask(port: int, data: bytes | Iterable[bytes], pause: float = 0.0) -> tuple[int, bytes]:
    """(status, everything that came) of one request; 0 where the connection was cut without an answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    reading = asyncio.ensure_future(_read_all(reader))
    try:
        for piece in [data] if isinstance(data, bytes) else data:
            if reading.done():
                break
            writer.write(piece)
            await writer.drain()
            if pause:
                await asyncio.sleep(pause)
    except ConnectionError:
        pass
    answer = await reading
    writer.close()
    return status_of(answer), answer


def status_of(answer: bytes) -> int:
    return int(answer[9:12]) if answer.startswith(b"HTTP/1.") else 0


async def _read_all(reader: asyncio.StreamReader) -> bytes:
    data = bytearray()
    try:
        while piece := await reader.read(1 << 16):
            data += piece
    except ConnectionError:
        pass
    return bytes(data)


async def open_idle(port: int, count: int) -> list[asyncio.StreamWriter]:
    """Connections that send nothing."""
    writers = []
    for start in range(0, count, 200):
        batch = (asyncio.open_connection("127.0.0.1", port) for _ in range(min(200, count - start)))
        writers += [writer for _, writer in await asyncio.gather(*batch)]
    return writers


async def vanish(port: int, count: int, *, after: int = 1) -> None:
    """``count`` streams at once whose clients hang up after some bytes of the answer."""

    async def one() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post(json.dumps(completion(stream=True, max_tokens=50_000)).encode()))
        answer = await reader.readexactly(12)
        assert status_of(answer) == 200, answer
        await reader.read(after)
        writer.transport.abort()

    for start in range(0, count, 250):
        await asyncio.gather(*(one() for _ in range(min(250, count - start))))


async def slow_readers(port: int, count: int) -> list[asyncio.StreamWriter]:
    """Streams whose clients read nothing: their receive buffers fill, then the server's."""
    import socket

    writers = []
    for _ in range(count):
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", port))
        _, writer = await asyncio.open_connection(sock=connection, limit=1)
        writer.transport.pause_reading()
        writer.write(request_bytes_with_key(completion(stream=True, max_tokens=20_000)))
        writers.append(writer)
    return writers


def request_bytes_with_key(body: dict[str, Any]) -> bytes:
    return request_bytes(COMPLETIONS, body).replace(b"Host: x\r\n", f"Host: x\r\n{AUTHORIZATION}".encode())


def close_all(writers: Iterable[asyncio.StreamWriter]) -> None:
    for writer in writers:
        writer.transport.abort()


async def until(condition: Callable[[], Awaitable[bool]], seconds: float = 60.0) -> bool:
    """Whether ``condition`` comes true in time."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while not await condition():
        if loop.time() > deadline:
            return False
        await asyncio.sleep(0.05)
    return True
