"""The way through a generating route: from an HTTP request to its answer, whole or as a stream of events."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from .body import read_json
from .sse import EventStream, EventWriter
from .state import ServerState, state_of
from .tracing import enter_trace


class Checked(Protocol):
    """A route's request: what is common to all of them."""

    model: str

    def check(self) -> None: ...


class Body(Checked, Protocol):
    """A request whose answer can be a stream."""

    stream: bool | None


class Answer(Protocol):
    """A prepared answer; nothing has been sent to the engine before ``events`` or ``collect`` runs."""

    id: str

    @property
    def writer(self) -> EventWriter | None:
        """Takes events past the generator, where the answer makes such."""

    def events(self) -> AsyncGenerator[bytes, None]: ...
    async def collect(self) -> Any: ...


B = TypeVar("B", bound=Body)
C = TypeVar("C", bound=Checked)


async def answer_request(
    request: Request, schema: type[B], prepare: Callable[[ServerState, B, float], Awaitable[Answer]]
) -> Response:
    """Read and check the body, ``prepare(state, body, arrival)`` the answer, and send it as the body asks."""
    arrival = time.monotonic()
    body = await read_body(request, schema)
    answer = await prepare(state_of(request), body, arrival)
    return await send_answer(request, answer, stream=bool(body.stream))


async def read_body(request: Request, schema: type[C]) -> C:
    """The request's body, checked, for a model that is served and an engine that is ready."""
    state = state_of(request)
    state.ready_client()
    if state.tracing is not None:
        enter_trace(request.headers)
    config = state.config
    body = await read_json(request, schema, max_bytes=config.max_body_bytes, seconds=config.body_seconds)
    state.check_model(body.model)
    body.check()
    return body


async def send_answer(
    request: Request, answer: Answer, *, stream: bool, stream_class: type[EventStream] = EventStream
) -> Response:
    """Compute ``answer`` and send it, whole or as it comes."""
    open_requests = state_of(request).open_requests
    headers = {"x-request-id": answer.id}
    if stream:
        return stream_class(answer.events(), open_requests, headers, answer.writer)
    return json_response(await open_requests.run(request.receive, answer.collect()), headers)


def json_response(result: Any, headers: dict[str, str] | None = None) -> Response:
    """A struct, or whatever msgspec takes, as JSON."""
    return Response(msgspec.json.encode(result), headers=headers, media_type="application/json")
