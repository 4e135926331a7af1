"""The process that a core lives in: take requests, step, send outputs; end with the parent, never before it."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Protocol

import zmq

from ...errors import TwofoldError
from ...log import get_logger
from ...platforms import cpu_threads
from ..config import EngineConfig
from ..messages import AbortRequest, EngineInfo, EngineRequest, EngineStats, TokenOutput
from . import wire

DEFAULT_CORE = "twofold.engine.core.engine_core:EngineCore"
HEARTBEAT_INTERVAL = 1.0
STATS_INTERVAL = 0.25

logger = get_logger(__name__)


class Core(Protocol):
    """What this process needs of a core; `EngineCore` is the real one."""

    def info(self) -> EngineInfo: ...

    def add_request(self, request: EngineRequest) -> None: ...

    def abort(self, request: AbortRequest) -> None: ...

    def step(self) -> list[TokenOutput]: ...

    def has_work(self) -> bool: ...

    def stats(self) -> EngineStats: ...

    def shutdown(self) -> None: ...


def run_core(config: EngineConfig, core_factory: str, directory: str) -> None:
    """Entry of the process. ``core_factory`` is ``module:callable``, given ``config``; exits 0 only when asked to."""
    # The parent decides when to stop: a Ctrl-C or a service manager's SIGTERM reaches the whole group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    context = zmq.Context()
    watch = _Watch(context, Path(directory))
    watch.start()
    outputs = wire.open_socket(context, zmq.PUSH, connect=wire.output_address(Path(directory)))
    requests = wire.open_socket(context, zmq.PULL, bind=wire.request_address(Path(directory)))
    code = 0
    try:
        core = _load_factory(core_factory)(config)
        cpu_threads.keep_thread_to(cpu_threads.team_cpus()[:1])
        wire.send(outputs, wire.Ready(core.info()))
        CoreLoop(core, requests, outputs, watch).run()
        core.shutdown()
    except Exception as error:
        # A user's mistake is told by the parent in one line; anything else needs its traceback.
        if not isinstance(error, TwofoldError):
            logger.exception("the engine core failed")
        wire.send(outputs, wire.Dead(wire.to_failure(error)))
        code = 1
    watch.stop()
    requests.close(linger=0)
    outputs.close(linger=2000)
    context.term()
    sys.stdout.flush()
    sys.stderr.flush()
    # Nothing is left to save; taking torch and the model apart object by object would only keep the parent waiting.
    os._exit(code)


def _load_factory(core_factory: str) -> Callable[[EngineConfig], Core]:
    module, _, name = core_factory.partition(":")
    return getattr(importlib.import_module(module), name)


class CoreLoop:
    """Steps while there is work, looking for messages in between; sleeps on the socket when there is none."""

    def __init__(self, core: Core, requests: zmq.Socket, outputs: zmq.Socket, watch: _Watch) -> None:
        self._core = core
        self._requests = requests
        self._outputs = outputs
        self._watch = watch
        self._next_stats = 0.0

    def run(self) -> None:
        """Until the client asks to stop; what the core raises in a step comes through."""
        self._send([], stats=True)
        while self._take_messages():
            if not self._core.has_work():
                self._requests.poll()
                continue
            self._watch.step_began = time.monotonic()
            outputs = self._core.step()
            self._watch.step_began = None
            idle = not self._core.has_work()
            self._send(outputs, stats=idle or time.monotonic() >= self._next_stats)

    def _take_messages(self) -> bool:
        """Handle every message that has arrived; False where the client asks to stop."""
        aborted = False
        while (message := wire.receive_in_core(self._requests)) is not None:
            if isinstance(message, wire.Shutdown):
                return False
            if isinstance(message, wire.Abort):
                aborted = True
                for request in message.requests:
                    self._core.abort(request)
            else:
                self._add(message.request)
        if aborted and not self._core.has_work():
            self._send([], stats=True)
        return True

    def _add(self, request: EngineRequest) -> None:
        try:
            self._core.add_request(request)
        except TwofoldError as error:
            wire.send(self._outputs, wire.Rejected(request.request_id, wire.to_failure(error)))

    def _send(self, outputs: list[TokenOutput], *, stats: bool) -> None:
        if not outputs and not stats:
            return
        if stats:
            self._next_stats = time.monotonic() + STATS_INTERVAL
        wire.send(self._outputs, wire.pack_outputs(outputs, self._core.stats() if stats else None))


class _Watch(threading.Thread):
    """Ends this process when the parent has gone, however it went, and tells the parent that this one lives."""

    def __init__(self, context: zmq.Context, directory: Path) -> None:
        super().__init__(name="twofold-core-watch", daemon=True)
        self._context = context
        self._directory = directory
        self._stop_reader, self._stop_writer = os.pipe()
        self.step_began: float | None = None

    def run(self) -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None, "the core runs in a child process"
        socket = wire.open_socket(self._context, zmq.PUSH, connect=wire.output_address(self._directory))
        while True:
            ready = wait([parent.sentinel, self._stop_reader], HEARTBEAT_INTERVAL)
            if self._stop_reader in ready:
                break
            if parent.sentinel in ready or os.getppid() != parent.pid:
                shutil.rmtree(self._directory, ignore_errors=True)
                os._exit(1)
            began = self.step_began
            wire.send(socket, wire.Heartbeat(0.0 if began is None else time.monotonic() - began))
        socket.close(linger=0)

    def stop(self) -> None:
        os.write(self._stop_writer, b"x")
        self.join()
