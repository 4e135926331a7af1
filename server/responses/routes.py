"""``/v1/responses``: make, read, cancel and delete responses."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response as HttpResponse

from ...errors import RequestError
from ..answer import json_response, read_body, send_answer
from ..owners import owner_of
from ..sse import NamedEventStream
from ..state import ServerState, state_of
from .answer import ResponseAnswer, prepare_response
from .event_log import replay
from .schema import ItemList, ResponseRequest, check_include
from .store import ResponseStore

_MAX_PAGE = 100


class Responses:
    """What the routes of one server share: the store, and the responses at work in the background."""

    def __init__(self, state: ServerState) -> None:
        self.store = ResponseStore(state.database)
        self.running: dict[str, tuple[asyncio.Task[None], ResponseAnswer]] = {}
        self._state = state
        self._swept = False

    async def sweep(self) -> None:
        """Once, before the first use: what an earlier run of the server left unfinished has failed."""
        if not self._swept:
            self._swept = True
            await self.store.fail_unfinished("the server stopped before this response was complete")

    def start(self, answer: ResponseAnswer) -> None:
        """Compute ``answer`` without a client that waits for it; draining waits for it like for any request."""
        task = asyncio.ensure_future(self._run(answer))
        self.running[answer.id] = task, answer

    async def cancel(self, response_id: str) -> None:
        """End a response at work and store it as cancelled; nothing where it is not at work (any more)."""
        task, answer = self.running.get(response_id, (None, None))
        if task is None or answer is None:
            return
        task.cancel()
        await asyncio.wait((task,))
        if response_id in self.running:
            await answer.cancel()
            self._forget(answer)

    async def _run(self, answer: ResponseAnswer) -> None:
        self._state.num_open += 1
        try:
            await self._state.open_requests.run(_never, answer.run_in_background())
        except Exception as error:
            await answer.give_up(error)
        finally:
            self._state.num_open -= 1
        # Not where `cancel` has ended the task: there is a last event to come.
        self._forget(answer)

    def _forget(self, answer: ResponseAnswer) -> None:
        if answer.log is not None:
            answer.log.close()
        self.running.pop(answer.id, None)


async def create_response(request: Request) -> HttpResponse:
    """Answer ``input``, at once, as a stream of events, or in the background."""
    arrival = time.monotonic()
    state, responses = await _shared(request)
    body = await read_body(request, ResponseRequest)
    answer = await prepare_response(state, responses.store, owner_of(request), body, arrival)
    if body.background:
        await answer.save()
        headers = {"x-request-id": answer.id}
        queued = json_response(answer.response, headers)
        responses.start(answer)
        if answer.log is None:
            return queued
        return NamedEventStream(answer.log.follow(), state.open_requests, headers)
    return await send_answer(request, answer, stream=bool(body.stream), stream_class=NamedEventStream)


async def count_input_tokens(request: Request) -> HttpResponse:
    """How many tokens the prompt of a response would have."""
    state, responses = await _shared(request)
    body = await read_body(request, ResponseRequest)
    answer = await prepare_response(state, responses.store, owner_of(request), body, 0.0)
    return json_response({"object": "response.input_tokens", "input_tokens": answer.num_input_tokens})


async def get_response(request: Request) -> HttpResponse:
    """A stored response, or the events of one that was streamed in the background, from where a client left off."""
    state, responses = await _shared(request)
    query = request.query_params
    check_include(value for name, value in query.multi_items() if name in ("include", "include[]"))
    response_id = request.path_params["response_id"]
    stored = await responses.store.get(owner_of(request), response_id)
    if query.get("stream", "false").lower() not in ("true", "1"):
        return json_response(stored.response)
    after = _starting_after(query.get("starting_after", "-1"))
    events = await _events(responses, response_id, after)
    return NamedEventStream(events, state.open_requests, {"x-request-id": response_id})


async def _events(responses: Responses, response_id: str, after: int) -> AsyncGenerator[bytes, None]:
    _, running = responses.running.get(response_id, (None, None))
    if running is not None and running.log is not None:
        return running.log.follow(after)
    stored = await responses.store.events(response_id)
    if stored is None:
        raise RequestError(
            f"{response_id!r} has no events to stream: they are kept for responses that were made with background and "
            "stream true; leave stream out",
            param="stream",
        )
    return replay(stored, after)


async def delete_response(request: Request) -> HttpResponse:
    """Forget a response; one that is at work in the background ends."""
    _, responses = await _shared(request)
    response_id = request.path_params["response_id"]
    await responses.store.delete(owner_of(request), response_id)
    await responses.cancel(response_id)
    return json_response({"id": response_id, "object": "response", "deleted": True})


async def cancel_response(request: Request) -> HttpResponse:
    """End a response in the background; one that has ended stays as it is."""
    _, responses = await _shared(request)
    owner, response_id = owner_of(request), request.path_params["response_id"]
    stored = await responses.store.get(owner, response_id)
    if not stored.response.background:
        raise RequestError(
            f"{response_id!r} was not made with background true; only such responses are cancelled", param="response_id"
        )
    await responses.cancel(response_id)
    return json_response((await responses.store.get(owner, response_id)).response)


async def list_input_items(request: Request) -> HttpResponse:
    """The items that the request of a stored response brought, newest first unless ``order=asc``."""
    _, responses = await _shared(request)
    stored = await responses.store.get(owner_of(request), request.path_params["response_id"])
    limit = _limit(request.query_params.get("limit", "20"))
    items = stored.items if request.query_params.get("order") == "asc" else stored.items[::-1]
    after = request.query_params.get("after")
    if after is not None:
        ids = [item["id"] for item in items]
        if after not in ids:
            raise RequestError(f"after: the response has no item {after!r}", param="after")
        items = items[ids.index(after) + 1 :]
    page = items[:limit]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    return json_response(ItemList(data=page, first_id=first, last_id=last, has_more=len(items) > limit))


async def _shared(request: Request) -> tuple[ServerState, Responses]:
    state = state_of(request)
    state.ready_client()
    responses = state.shared(Responses)
    await responses.sweep()
    return state, responses


def _limit(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= _MAX_PAGE):
        raise RequestError(f"limit is {text[:40]!r}; it must be from 1 to {_MAX_PAGE}", param="limit")
    return int(text)


def _starting_after(text: str) -> int:
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit() and len(digits) < 10):
        raise RequestError(f"starting_after is {text[:40]!r}; it must be a number of an event", param="starting_after")
    return int(text)


async def _never() -> Any:
    """A client that neither sends nor leaves."""
    await asyncio.Event().wait()
