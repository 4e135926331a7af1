"""A tiny OpenAI-compatible server with scripted answers, for clients that must work with any such server."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class ScriptedServer(ThreadingHTTPServer):
    """Streams ``max_tokens`` pieces per request, ``pause`` seconds apart; counts what it saw.

    ``usage`` False leaves out the usage block, ``fail_from`` answers that request and later ones with HTTP 500,
    ``break_after`` sends an error event after that many pieces, ``num_hung_up`` counts clients that went away.
    """

    daemon_threads = True

    def __init__(self, pause: float = 0.0, usage: bool = True, fail_from: int | None = None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.pause, self.usage, self.fail_from = pause, usage, fail_from
        self.break_after: int | None = None
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.lock = threading.Lock()
        self.num_open = self.max_open = self.num_hung_up = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hung up is expected here."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ScriptedServer

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        self._answer(200, {"data": [{"id": "scripted"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        with server.lock:
            server.bodies.append(body)
            server.headers.append(dict(self.headers))
            number = len(server.bodies)
            server.num_open += 1
            server.max_open = max(server.max_open, server.num_open)
        try:
            # A request counts as open until its last bytes go out: its client may send the next one at once.
            if server.fail_from is not None and number >= server.fail_from:
                self._count_out()
                self._answer(500, {"error": {"message": "scripted failure"}})
            elif body["model"] != "scripted":
                self._count_out()
                self._answer(404, {"error": {"message": f"no model {body['model']}"}})
            else:
                self._stream(body)
        except OSError:
            server.num_hung_up += 1

    def _stream(self, body: dict[str, Any]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        chat = "messages" in body
        num_tokens = body.get("max_tokens", 4)
        for index in range(num_tokens):
            if index == self.server.break_after:
                self._event({"error": {"message": "scripted break"}})
                break
            text = f"w{index} "
            choice = {"index": 0, "delta": {"content": text}} if chat else {"index": 0, "text": text}
            self._event({"choices": [choice]})
            time.sleep(self.server.pause)
        if self.server.usage and (body.get("stream_options") or {}).get("include_usage"):
            prompt = len(body["prompt"].split()) if not chat else 1
            self._event({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": num_tokens}})
        self._count_out()
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _count_out(self) -> None:
        with self.server.lock:
            self.server.num_open -= 1

    def _event(self, event: dict[str, Any]) -> None:
        self._chunk(f"data: {json.dumps(event)}\n\n".encode())

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def scripted_server(**options: Any) -> Iterator[ScriptedServer]:
    """A running ScriptedServer."""
    server = ScriptedServer(**options)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
