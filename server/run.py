"""A whole server: bind the port, load the model behind it, serve, drain on a signal, end with the right exit code."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import resource
import signal
import socket
from collections.abc import Callable
from typing import Any

import uvicorn
from starlette.applications import Starlette

from ..engine.client import AsyncEngineClient
from ..engine.config import EngineConfig
from ..errors import ConfigError, EngineBusyError
from ..log import get_logger
from ..platforms import cpu_threads
from ..platforms.heap import trim_heap
from .app import create_app
from .batches.runner import Batches
from .config import ServerConfig
from .connection import KEEP_ALIVE_SECONDS, ConnectionLimits, bounded_connection
from .state import ServerState
from .tls import Certificate

logger = get_logger(__name__)

# How often the end of the last request is looked for while draining, and the engine's death while serving.
_IDLE_POLL = 0.05
_DEATH_POLL = 0.25
# How long clients get to read the last event of a request that was ended for them.
_FLUSH_SECONDS = 2.0
_BACKLOG = 2048
# What the engine, the database, logs and batches may have open beside the connections.
_OTHER_DESCRIPTORS = 256


def run_server(
    engine_config: EngineConfig,
    server_config: ServerConfig,
    *,
    on_ready: Callable[[str, str], None] | None = None,
    client_options: dict[str, Any] | None = None,
) -> int:
    """Serve until a signal or the engine's death; returns the exit code: 0 after a signal, 1 after a death.

    The port answers from the start, /health with 503 until the model is loaded. ``on_ready(url, model name)`` runs
    once requests are taken. ``client_options`` go to AsyncEngineClient. Raises TwofoldError where the port cannot be
    bound or the engine cannot start.
    """
    server = _Server(engine_config, server_config, on_ready, client_options or {})
    loop = _new_loop()
    asyncio.set_event_loop(loop)
    try:
        return loop.run_until_complete(server.run())
    finally:
        asyncio.set_event_loop(None)
        loop.close()


class _Server:
    def __init__(
        self,
        engine_config: EngineConfig,
        config: ServerConfig,
        on_ready: Callable[[str, str], None] | None,
        client_options: dict[str, Any],
    ) -> None:
        self._engine_config = engine_config
        self._config = config
        self._on_ready = on_ready
        self._client_options = client_options
        self._socket = _bind(config.host, config.port)
        self._app: Starlette = create_app(None, config)
        self._state: ServerState = self._app.state.server
        self._certificate = (
            Certificate(config.tls_certfile, config.tls_keyfile) if config.tls_certfile and config.tls_keyfile else None
        )
        self._http = _http_server(self._app, config, self._certificate)
        self._stop = asyncio.Event()

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        if self._config.state_dir is not None:
            # A folder that cannot be used ends the start, not the first request that needs it.
            await self._state.database.run(lambda connection: None)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        loop.add_signal_handler(signal.SIGHUP, self._reload)
        serving = asyncio.ensure_future(self._http.serve(sockets=[self._socket]))
        try:
            return await self._live()
        finally:
            self._http.should_exit = True
            await serving
            self._socket.close()
            self._state.database.close()
            if self._state.tracing is not None:
                self._state.tracing.close()

    async def _live(self) -> int:
        client = await self._load()
        if client is None:
            return 0
        try:
            await self._until_stopped(client)
            if client.errored:
                logger.error("the engine has died (%s); the server ends", client.error)
                await self._until_idle(_FLUSH_SECONDS)
                return 1
            await self._drain()
            return 0
        finally:
            await client.shutdown()

    async def _load(self) -> AsyncEngineClient | None:
        """A ready client, or None where a signal came first."""
        loading = asyncio.ensure_future(self._start_engine())
        stopped = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait((loading, stopped), return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not loading.done():
            logger.info("stopped while the model was loading")
            loading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await loading
            return None
        return loading.result()

    async def _start_engine(self) -> AsyncEngineClient:
        client = await AsyncEngineClient.start(self._engine_config, **self._client_options)
        self._state.attach(client)
        _settle_memory()
        cpu_threads.keep_process_to(client.info.rest_cpus)
        if self._config.state_dir is not None:
            await self._state.shared(Batches).resume()
        if self._on_ready is not None:
            host, port = self._socket.getsockname()[:2]
            self._on_ready(_url(host, port, self._certificate is not None), self._state.served_names[0])
        return client

    async def _until_stopped(self, client: AsyncEngineClient) -> None:
        while not self._stop.is_set() and not client.errored:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._stop.wait(), _DEATH_POLL)
            if self._certificate is not None:
                self._certificate.reload_if_changed()

    async def _drain(self) -> None:
        """Let running requests finish within the grace time, then end the rest with an error that says so."""
        grace = self._config.grace_seconds
        logger.info("stopping: %d open requests have %g s to finish", self._state.num_open, grace)
        if await self._until_idle(grace):
            return
        logger.warning("%d requests did not finish within %g s; they are ended", self._state.num_open, grace)
        message = f"the server is shutting down and this request did not finish within {grace:g} s"
        self._state.open_requests.interrupt(EngineBusyError(message))
        await self._until_idle(_FLUSH_SECONDS)

    async def _until_idle(self, seconds: float) -> bool:
        """True once no request is open, False when the time is up."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while self._state.num_open:
            if loop.time() >= deadline:
                return False
            await asyncio.sleep(_IDLE_POLL)
        return True

    def _reload(self) -> None:
        """SIGHUP: read the certificate and the API keys again."""
        self._state.api_keys.reload()
        if self._certificate is not None:
            self._certificate.reload()

    def _on_signal(self, number: int) -> None:
        if self._stop.is_set():
            logger.warning("second signal: the server ends at once")
            # The core ends by itself when its parent has gone.
            os._exit(128 + number)
        self._state.begin_drain()
        self._stop.set()


class _HttpServer(uvicorn.Server):
    """uvicorn without its own signal handling: a signal means a drain here."""

    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        yield


def _http_server(app: Starlette, config: ServerConfig, certificate: Certificate | None = None) -> _HttpServer:
    settings = uvicorn.Config(
        app,
        http=bounded_connection(connection_limits(config)),
        ws="none",
        lifespan="off",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=int(_FLUSH_SECONDS),
        ssl_certfile=config.tls_certfile,
        ssl_keyfile=config.tls_keyfile,
    )
    if certificate is not None:
        settings.load()
        # The context that can be filled anew while connections go on.
        settings.ssl = certificate.context
    return _HttpServer(settings)


def connection_limits(config: ServerConfig) -> ConnectionLimits:
    """The limits of ``config``, as far as the system lets this process open descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = config.max_connections + _OTHER_DESCRIPTORS
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    limit = config.max_connections
    if soft != resource.RLIM_INFINITY and soft < wanted:
        limit = max(1, soft - _OTHER_DESCRIPTORS)
        logger.warning("the system allows %d open files, so at most %d connections are taken (ulimit -n)", soft, limit)
    return ConnectionLimits(max_connections=limit, head_seconds=config.body_seconds)


def _bind(host: str, port: int) -> socket.socket:
    """A bound socket that accepts nothing yet; ConfigError where that is impossible."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
        return listener
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(
            f"cannot listen on {host} port {port}: {reason}; choose others with --host and --port"
        ) from None


def _settle_memory() -> None:
    """Keep the collector off what lives as long as the server, and let it look seldom: a token makes no cycles."""
    trim_heap()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


def _url(host: str, port: int, tls: bool = False) -> str:
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"{'https' if tls else 'http'}://{shown}:{port}"


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
