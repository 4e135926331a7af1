"""Connections at their limits: too many, too slow, too large, and clients that read nothing or leave."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import http_server
import pytest
import twofold
from http_server import RunningServer, counting_server
from twofold.server.connection import MAX_HEAD_BYTES, MAX_HEADERS, ConnectionLimits, bounded_connection

BENCHMARKS = Path(twofold.__file__).parent / "benchmarks"


@pytest.fixture(scope="module")
def limits() -> ConnectionLimits:
    return ConnectionLimits(max_connections=4, head_seconds=0.3, idle_seconds=60.0, stall_seconds=0.3)


@pytest.fixture(scope="module")
def server(limits: ConnectionLimits) -> Iterator[RunningServer]:
    """A server for four connections at once."""
    with pytest.MonkeyPatch.context() as patch:
        original = http_server._http_server

        def limited(*args: object) -> object:
            made = original(*args)  # type: ignore[arg-type]
            made.config.http = bounded_connection(limits)
            return made

        patch.setattr(http_server, "_http_server", limited)
        with counting_server("SlowCore") as running:
            running.http.close()
            yield running


def connect(server: RunningServer, receive_buffer: int | None = None) -> socket.socket:
    connection = socket.socket()
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.settimeout(60)
    connection.connect(("127.0.0.1", server.port))
    return connection


def stream_request(**fields: object) -> bytes:
    body = {"model": "counting", "prompt": "a", "stream": True, "ignore_eos": True, **fields}
    content = json.dumps(body).encode()
    return f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content


def read_all(connection: socket.socket) -> bytes:
    data = b""
    while piece := connection.recv(1 << 16):
        data += piece
    return data


def health(server: RunningServer) -> bytes:
    with connect(server) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        return read_all(connection)


def wait_until_gone(server: RunningServer, limits: ConnectionLimits) -> None:
    deadline = time.monotonic() + 30
    while limits.idle or server.state.num_open:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_oldest_idle_connection_makes_room(server: RunningServer, limits: ConnectionLimits) -> None:
    connections = [connect(server) for _ in range(4)]
    deadline = time.monotonic() + 30
    while len(limits.idle) < 4:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert health(server).startswith(b"HTTP/1.1 200 ")
    assert read_all(connections[0]) == b"", "the first to come is the first to go"
    connections[3].sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    assert connections[3].recv(4096).startswith(b"HTTP/1.1 200 ")
    for connection in connections:
        connection.close()
    wait_until_gone(server, limits)


def test_full_of_answers(server: RunningServer, limits: ConnectionLimits) -> None:
    """No connection is idle: the next is told so at once, and there is room again when one has gone."""
    connections = [connect(server) for _ in range(4)]
    for connection in connections:
        connection.sendall(stream_request(max_tokens=4000))
        assert connection.recv(12) == b"HTTP/1.1 200"
    with connect(server) as refused:
        answer = read_all(refused)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 ") and b"retry-after: 1" in head.lower()
    assert "4 connections" in json.loads(body)["error"]["message"]
    for connection in connections:
        connection.close()
    wait_until_gone(server, limits)
    assert health(server).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /health HTTP/1.1\r\n" + b"X-A: b\r\n" * (MAX_HEADERS + 1) + b"\r\n", 431),
        (b"GET /health HTTP/1.1\r\nX-A: " + b"a" * MAX_HEAD_BYTES + b"\r\n\r\n", 431),
        (b"GET /" + b"a" * MAX_HEAD_BYTES + b" HTTP/1.1\r\n\r\n", 431),
        (b"GET /health HTTP/1.1\r\nX-A: " + b"a" * (1 << 20), 431),
        (b"GET /health HTTP/1.1\r\nX-A: b\r\n", 408),
        (b"G", 408),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
        (b"GET /\xff HTTP/1.1\r\n\r\n", 400),
    ],
)
def test_heads_that_are_refused(server: RunningServer, limits: ConnectionLimits, head: bytes, status: int) -> None:
    with connect(server) as connection:
        connection.sendall(head)
        answer, _, body = read_all(connection).partition(b"\r\n\r\n")
    assert answer.startswith(f"HTTP/1.1 {status} ".encode()) and b"connection: close" in answer.lower()
    assert json.loads(body)["error"]["type"] == "invalid_request_error"
    wait_until_gone(server, limits)


def test_pipelined_requests_are_answered_in_turn(server: RunningServer, limits: ConnectionLimits) -> None:
    with connect(server) as connection:
        one = b"GET /health HTTP/1.1\r\nHost: x\r\n"
        connection.sendall((one + b"\r\n") * 3 + one + b"Connection: close\r\n\r\n")
        assert read_all(connection).count(b"HTTP/1.1 200 ") == 4
    wait_until_gone(server, limits)


def test_a_reader_that_reads_nothing_is_cut_off(server: RunningServer, limits: ConnectionLimits) -> None:
    """Echoes of 5 MB fill every buffer on the way; nobody takes them."""
    with connect(server, receive_buffer=4096) as connection:
        connection.sendall(stream_request(prompt=["a" * 4000] * 1200, echo=True, max_tokens=1))
        deadline = time.monotonic() + 60
        while not server.state.num_open:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        wait_until_gone(server, limits)
    assert health(server).startswith(b"HTTP/1.1 200 ")


def attack(*arguments: str, seconds: float) -> None:
    command = [sys.executable, str(BENCHMARKS / "server_robustness.py"), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    assert result.returncode == 0, result.stdout + result.stderr


def test_attacks_on_a_small_scale() -> None:
    attack("--scale", "0.02", seconds=280)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_attacks() -> None:
    attack(seconds=1700)
