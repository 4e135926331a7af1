"""The client's end of a core process: start it, exchange messages, notice its end, stop it."""

from __future__ import annotations

import asyncio
import atexit
import multiprocessing
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import zmq

from ...errors import EngineDeadError, TwofoldError
from ...log import get_logger
from ..config import EngineConfig
from ..messages import EngineInfo
from . import wire
from .core_process import HEARTBEAT_INTERVAL, run_core

# Unix socket paths end at 107 characters; a longer temporary folder falls back to /tmp.
_LONGEST_DIRECTORY = 80
_MESSAGES_PER_TURN = 64

logger = get_logger(__name__)


class CoreHandle:
    """One core process, used from one event loop.

    ``on_message`` gets every message after `wire.Ready`; ``on_death`` is called once, with the reason, when the core
    ends or hangs without having been asked to stop. ``hang_timeout`` is the longest that a step may take, in seconds.
    """

    def __init__(
        self,
        on_message: Callable[[wire.FromCore], None],
        on_death: Callable[[TwofoldError], None],
        *,
        hang_timeout: float,
    ) -> None:
        self._on_message = on_message
        self._on_death = on_death
        self._hang_timeout = hang_timeout
        self._directory = _private_directory()
        self._context = zmq.Context()
        self._requests = wire.open_socket(self._context, zmq.PUSH)
        self._outputs = wire.open_socket(self._context, zmq.PULL, bind=wire.output_address(self._directory))
        self._outputs_fd = int(self._outputs.getsockopt(zmq.FD))
        self._process: multiprocessing.process.BaseProcess | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready: asyncio.Future[EngineInfo] | None = None
        self._last_heard = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._ended = asyncio.Event()
        self._connected = False
        self._dying = False
        self._closed = False

    @property
    def pid(self) -> int | None:
        """Process id of the core, None before `start`."""
        return None if self._process is None else self._process.pid

    async def start(self, config: EngineConfig, core_factory: str) -> EngineInfo:
        """Spawn the core and wait until it is ready; raises what the core raised, or EngineDeadError."""
        self._loop = asyncio.get_running_loop()
        self._ready = self._loop.create_future()
        self._process = multiprocessing.get_context("spawn").Process(
            target=run_core, args=(config, core_factory, str(self._directory)), name="twofold-core"
        )
        self._process.start()
        # Without this an interpreter that ends with the core still running would wait for it for ever.
        atexit.register(self._process.kill)
        self._loop.add_reader(self._outputs_fd, self._read)
        self._loop.add_reader(self._process.sentinel, self._on_exit)
        # The socket's descriptor tells changes only: whatever came before it was watched is asked for once.
        self._read()
        info = await self._ready
        self._last_heard = time.monotonic()
        self._watch()
        return info

    def send(self, message: wire.ToCore) -> None:
        """Queue a message for a core that has become ready; it does not matter whether it still lives."""
        if self._connected and not self._closed:
            wire.send(self._requests, message)

    async def stop(self, timeout: float) -> None:
        """Ask the core to exit, kill it after ``timeout`` seconds, and clean up. May be called more than once."""
        if self._closed:
            return
        self._dying = True
        if self._connected and not self._ended.is_set():
            self.send(wire.Shutdown())
            try:
                await asyncio.wait_for(self._ended.wait(), timeout)
            except asyncio.TimeoutError:
                logger.warning("the engine core did not stop within %.1f s; it is killed", timeout)
        self.kill()

    def kill(self) -> None:
        """End the core at once and clean up."""
        if self._closed:
            return
        self._closed = True
        self._stop_watching()
        if self._process is not None:
            self._process.kill()
            self._process.join()
            atexit.unregister(self._process.kill)
        self._requests.close(linger=0)
        self._outputs.close(linger=0)
        self._context.term()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _read(self) -> None:
        for _ in range(_MESSAGES_PER_TURN):
            if self._closed:
                return
            message = wire.receive_in_client(self._outputs)
            if message is None:
                return
            self._handle(message)
        # A long queue must not hold up the loop; the descriptor will not fire again for what is left.
        assert self._loop is not None
        self._loop.call_soon(self._read)

    def _handle(self, message: wire.FromCore) -> None:
        assert self._ready is not None
        if isinstance(message, wire.Heartbeat):
            self._last_heard = time.monotonic() - message.busy
        elif isinstance(message, wire.Ready):
            if not self._ready.done():
                # Only now: whoever connects can send at once, and the core has bound its end by the time it is ready.
                self._requests.connect(wire.request_address(self._directory))
                self._connected = True
                self._ready.set_result(message.info)
        elif isinstance(message, wire.Dead):
            self._die(wire.to_error(message.failure))
        else:
            self._last_heard = time.monotonic()
            self._on_message(message)

    def _on_exit(self) -> None:
        assert self._loop is not None and self._process is not None
        self._loop.remove_reader(self._process.sentinel)
        # What the core said before its end counts first: its outputs, and why it died.
        while not self._closed and (message := wire.receive_in_client(self._outputs)) is not None:
            self._handle(message)
        self._process.join()
        code = self._process.exitcode
        hint = " (killed; is there enough memory?)" if code == -9 else ""
        self._die(EngineDeadError(f"the engine core ended with exit code {code}{hint}"))
        self._ended.set()

    def _die(self, error: TwofoldError) -> None:
        assert self._ready is not None
        if self._dying:
            return
        self._dying = True
        if not self._ready.done():
            self._ready.set_exception(error)
        else:
            self._on_death(error)

    def _watch(self) -> None:
        """Declare the core dead when one step lasts, or nothing is heard, for longer than the hang timeout."""
        assert self._loop is not None and self._process is not None
        if self._closed or self._ended.is_set():
            return
        self._read()
        silence = time.monotonic() - self._last_heard
        if silence > self._hang_timeout + 2 * HEARTBEAT_INTERVAL:
            self._die(
                EngineDeadError(
                    f"the engine core has been busy with one step for {silence:.0f} s, longer than the limit of "
                    f"{self._hang_timeout:g} s"
                )
            )
            self._process.kill()
            return
        self._timer = self._loop.call_later(HEARTBEAT_INTERVAL, self._watch)

    def _stop_watching(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._loop is None or self._process is None or self._loop.is_closed():
            return
        self._loop.remove_reader(self._outputs_fd)
        if not self._ended.is_set():
            self._loop.remove_reader(self._process.sentinel)


def _private_directory() -> Path:
    directory = Path(tempfile.mkdtemp(prefix="twofold-"))
    if len(str(directory)) > _LONGEST_DIRECTORY:
        directory.rmdir()
        directory = Path(tempfile.mkdtemp(prefix="twofold-", dir="/tmp"))
    return directory
