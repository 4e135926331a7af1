"""A real server for tests: uvicorn on a free port, in a thread of the test process or as a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
from counting_server import ChatByteTokenizer
from starlette.applications import Starlette
from twofold.engine.client import AsyncEngineClient
from twofold.engine.config import EngineConfig
from twofold.errors import ConfigError
from twofold.server.app import create_app
from twofold.server.config import ServerConfig
from twofold.server.run import _bind, _http_server
from twofold.server.state import ServerState

SUPPORT = Path(__file__).parent

# The first start after a change compiles the C kernels, which takes minutes on a machine that is busy.
_START_SECONDS = 600


class RunningServer:
    """A server in a thread. ``state`` and ``client`` belong to that thread's event loop: look, do not call."""

    def __init__(self, app: Starlette, client: AsyncEngineClient, port: int) -> None:
        self.app = app
        self.state: ServerState = app.state.server
        self.client = client
        self.url = f"http://127.0.0.1:{port}"
        self.port = port
        self.http = httpx.Client(base_url=self.url, timeout=60)
        self.openai = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)

    @property
    def model(self) -> str:
        return self.state.served_names[0]

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return self.http.post(path, json=body, **options)

    def complete(self, prompt: Any, **fields: Any) -> dict[str, Any]:
        """The JSON of a completion that must succeed."""
        return _success(self.post("/v1/completions", {"model": self.model, "prompt": prompt, **fields}))

    def chat(self, content: Any, **fields: Any) -> dict[str, Any]:
        """The JSON of a chat completion that must succeed; ``content`` is a text or whole messages."""
        messages = content if isinstance(content, list) else [{"role": "user", "content": content}]
        return _success(self.post("/v1/chat/completions", {"model": self.model, "messages": messages, **fields}))

    def events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The events of a stream up to ``[DONE]``, or to its end where that is missing."""
        body = {"model": self.model, "stream": True, **body}
        with self.http.stream("POST", path, json=body) as response:
            assert response.status_code == 200, response.read()
            return list(parse_events(response.iter_lines()))

    def wait_idle(self, seconds: float = 60.0) -> None:
        """Until neither the server nor the engine has anything left of any request."""
        deadline = time.monotonic() + seconds
        while not self.is_idle:
            assert time.monotonic() < deadline, f"still open: {self.state.num_open}, {self.client.stats()}"
            time.sleep(0.01)

    @property
    def is_idle(self) -> bool:
        stats = self.client.stats()
        open_counts = (self.state.num_open, len(self.state.open_requests), self.client.num_open_requests)
        return not any((*open_counts, stats.num_running, stats.num_waiting, stats.num_live_blocks))


def parse_events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """Events of a stream; ``[DONE]`` comes as ``{"done": True}``."""
    for line in lines:
        if line.startswith("data: "):
            data = line[len("data: ") :]
            yield {"done": True} if data == "[DONE]" else json.loads(data)


def _success(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    return response.json()


@contextlib.contextmanager
def running_server(
    model: str | Path = "counting",
    *,
    server: dict[str, Any] | None = None,
    client: dict[str, Any] | None = None,
    **engine: Any,
) -> Iterator[RunningServer]:
    """A ready server: ``client`` are AsyncEngineClient's options, ``server`` ServerConfig's, others EngineConfig's."""
    engine_config = EngineConfig(model=str(model), **engine)
    server_config = ServerConfig(port=0, **(server or {}))
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def call(coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(_START_SECONDS)

    async def start() -> tuple[AsyncEngineClient, Starlette, Any, Any, int]:
        engine_client = await AsyncEngineClient.start(engine_config, **(client or {}))
        app = create_app(engine_client, server_config)
        listener = _bind(server_config.host, 0)
        http = _http_server(app, server_config)
        serving = asyncio.ensure_future(http.serve(sockets=[listener]))
        return engine_client, app, http, serving, listener.getsockname()[1]

    engine_client, app, http, serving, port = call(start())
    running = RunningServer(app, engine_client, port)
    try:
        yield running
    finally:
        running.http.close()
        running.openai.close()
        http.should_exit = True

        async def stop() -> None:
            await serving
            await engine_client.shutdown()

        call(stop())
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)


def counting_server(core: str = "CountingCore", **options: Any) -> contextlib.AbstractContextManager[RunningServer]:
    """A server over a core of counting_core, which needs no model."""
    client = {"core_factory": f"counting_core:{core}", "tokenizer": ChatByteTokenizer(), **options.pop("client", {})}
    return running_server("counting", client=client, **options)


class ServerProcess:
    """``counting_server.py`` as a process, for signals and exit codes."""

    def __init__(self, core: str, *, wait: bool = True, **server: Any) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        command = [sys.executable, str(SUPPORT / "counting_server.py"), core, json.dumps({"port": self.port, **server})]
        self.process = subprocess.Popen(command)
        self.wait_for(200 if wait else 503)

    def wait_for(self, status: int, seconds: float = 120.0) -> None:
        """Until /health answers with ``status``."""
        deadline = time.monotonic() + seconds
        while self.health() != status:
            assert self.process.poll() is None, f"the server ended with {self.process.returncode}"
            assert time.monotonic() < deadline, f"/health is {self.health()}"
            time.sleep(0.02)

    def health(self) -> int:
        """The status of /health, 0 where nobody listens."""
        try:
            return httpx.get(f"{self.url}/health", timeout=60).status_code
        except httpx.TransportError:
            return 0

    def stream(self, prompt: str, max_tokens: int) -> StreamReader:
        return StreamReader(self.url, prompt, max_tokens)

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def exit_code(self, seconds: float = 60.0) -> int:
        return self.process.wait(seconds)

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *exception: Any) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)


class StreamReader:
    """Reads a streamed completion in a thread; ``events`` grows."""

    def __init__(self, url: str, prompt: str, max_tokens: int) -> None:
        self.events: list[dict[str, Any]] = []
        self.error: Exception | None = None
        self._body = {
            "model": "counting",
            "prompt": prompt,
            "max_tokens": max_tokens,
            "stream": True,
            "ignore_eos": True,
        }
        self._url = url
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            with httpx.stream("POST", f"{self._url}/v1/completions", json=self._body, timeout=200) as response:
                assert response.status_code == 200, response.read()
                for item in parse_events(response.iter_lines()):
                    self.events.append(item)
        except (httpx.HTTPError, AssertionError) as error:
            self.error = error

    def wait_for_events(self, count: int, seconds: float = 120.0) -> None:
        deadline = time.monotonic() + seconds
        while len(self.events) < count:
            assert time.monotonic() < deadline and self.error is None, self.error
            time.sleep(0.005)

    def finish(self, seconds: float = 120.0) -> list[dict[str, Any]]:
        self._thread.join(seconds)
        assert not self._thread.is_alive(), "the stream has not ended"
        return self.events


def free_port() -> int:
    """A port that nobody uses, out of a range from which systems give none to outgoing connections."""
    while True:
        port = random.randrange(20_000, 30_000)
        with contextlib.suppress(ConfigError), contextlib.closing(_bind("127.0.0.1", port)):
            return port
