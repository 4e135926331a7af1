"""The messages between a client and a core in another process: msgpack, tagged by class name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import zmq

from ... import errors
from ...errors import EngineDeadError, RequestError, TwofoldError
from ..messages import AbortRequest, EngineInfo, EngineRequest, EngineStats, TokenOutput


class Add(msgspec.Struct, tag=True, array_like=True):
    """Client to core: take this request."""

    request: EngineRequest


class Abort(msgspec.Struct, tag=True, array_like=True):
    """Client to core: stop these."""

    requests: list[AbortRequest]


class Shutdown(msgspec.Struct, tag=True, array_like=True):
    """Client to core: stop everything and exit with code 0."""


class Failure(msgspec.Struct, array_like=True):
    """An exception as it crosses the line; ``kind`` is the class's name."""

    kind: str
    message: str
    param: str | None = None
    code: str | None = None


class Ready(msgspec.Struct, tag=True, array_like=True):
    """Core to client, first message: the model is loaded."""

    info: EngineInfo


class Dead(msgspec.Struct, tag=True, array_like=True):
    """Core to client, last message: the core could not start, or a step of it failed."""

    failure: Failure


class Rejected(msgspec.Struct, tag=True, array_like=True):
    """Core to client: this request was not admitted."""

    request_id: str
    failure: Failure


class Tokens(msgspec.Struct, array_like=True):
    """Columns, one row for each output that is one token and nothing else: nearly all that a busy core says."""

    request_ids: list[str] = msgspec.field(default_factory=list)
    indices: list[int] = msgspec.field(default_factory=list)
    token_ids: list[int] = msgspec.field(default_factory=list)
    num_cached_tokens: list[int] = msgspec.field(default_factory=list)


class Outputs(msgspec.Struct, tag=True, array_like=True):
    """Core to client: all outputs of one step, and now and then the statistics."""

    outputs: list[TokenOutput]
    stats: EngineStats | None = None
    tokens: Tokens = msgspec.field(default_factory=Tokens)


class Heartbeat(msgspec.Struct, tag=True, array_like=True):
    """Core to client, every second: how long its present step has been running, in seconds."""

    busy: float


ToCore = Add | Abort | Shutdown
FromCore = Ready | Dead | Rejected | Outputs | Heartbeat

_encoder = msgspec.msgpack.Encoder()
_to_core = msgspec.msgpack.Decoder(ToCore)
_from_core = msgspec.msgpack.Decoder(FromCore)


def send(socket: zmq.Socket, message: ToCore | FromCore) -> None:
    """Queue a message; never blocks, for the sockets have no high-water mark."""
    socket.send(_encoder.encode(message), zmq.NOBLOCK)


def pack_outputs(outputs: list[TokenOutput], stats: EngineStats | None) -> Outputs:
    """One step's outputs as a message; a sample has one output a step at most, so their order does not matter."""
    tokens, others = Tokens(), []
    for output in outputs:
        if (
            len(output.token_ids) != 1
            or output.finish_reason is not None
            or output.logprobs is not None
            or output.prompt_logprobs is not None
            or output.queue_seconds is not None
        ):
            others.append(output)
            continue
        tokens.request_ids.append(output.request_id)
        tokens.indices.append(output.index)
        tokens.token_ids.append(output.token_ids[0])
        tokens.num_cached_tokens.append(output.num_cached_tokens)
    return Outputs(others, stats, tokens)


def receive_in_core(socket: zmq.Socket) -> ToCore | None:
    """The next message from the client, or None."""
    data = _receive(socket)
    return None if data is None else _to_core.decode(data)


def receive_in_client(socket: zmq.Socket) -> FromCore | None:
    """The next message from the core, or None."""
    data = _receive(socket)
    return None if data is None else _from_core.decode(data)


def _receive(socket: zmq.Socket) -> bytes | None:
    try:
        return socket.recv(zmq.NOBLOCK)
    except zmq.Again:
        return None


def open_socket(context: zmq.Context, kind: int, **attach: str) -> zmq.Socket:
    """A socket without a high-water mark; ``attach`` is ``bind=address`` or ``connect=address``."""
    socket = context.socket(kind)
    socket.set_hwm(0)
    for how, address in attach.items():
        getattr(socket, how)(address)
    return socket


def request_address(directory: Path) -> str:
    """Where requests go from the client to the core."""
    return f"ipc://{directory}/requests"


def output_address(directory: Path) -> str:
    """Where everything goes from the core to the client."""
    return f"ipc://{directory}/outputs"


def to_failure(error: BaseException) -> Failure:
    """Describe an exception; Twofold's own keep their class, others become an EngineDeadError that names theirs."""
    if not isinstance(error, TwofoldError):
        return Failure(EngineDeadError.__name__, f"the engine core failed: {type(error).__name__}: {error}")
    param, code = getattr(error, "param", None), getattr(error, "code", None)
    return Failure(type(error).__name__, str(error), param, code)


def to_error(failure: Failure) -> TwofoldError:
    """The exception that `to_failure` described."""
    kind: Any = getattr(errors, failure.kind, EngineDeadError)
    if kind is RequestError:
        return RequestError(failure.message, param=failure.param, code=failure.code)
    if issubclass(kind, RequestError):
        return kind(failure.message, param=failure.param)
    return kind(failure.message)
