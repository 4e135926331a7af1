"""One response in the making: whole, as a stream of events, or in the background."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec

from ...errors import ContextLengthError, RequestError, TwofoldError
from ..chat import ChatAnswer
from ..errors import error_reply
from ..schema import Usage
from ..sse import EventWriter
from ..state import ServerState
from .conversation import input_items
from .event_log import EventLog
from .output import Event, OutputBuilder
from .schema import (
    IncompleteDetails,
    InputTokensDetails,
    OutputTokensDetails,
    Response,
    ResponseError,
    ResponseRequest,
    ResponseUsage,
)
from .store import UNFINISHED, ResponseStore
from .truncation import fitting_chat

# What the chat route calls it -> what it is called here.
_NAMES = {"messages": "input", "max_tokens": "max_output_tokens", "max_completion_tokens": "max_output_tokens"}


async def prepare_response(
    state: ServerState, store: ResponseStore, owner: str, body: ResponseRequest, arrival: float
) -> ResponseAnswer:
    """Check everything that can be checked before the engine is asked (RequestError, ContextLengthError)."""
    items = input_items(body)
    history: list[dict[str, Any]] = []
    if body.previous_response_id is not None:
        history = await store.history(owner, body.previous_response_id, state.config.max_body_bytes)
    try:
        answer = await fitting_chat(state, body, history, items, arrival)
    except RequestError as error:
        raise _renamed(error) from None
    params = answer.params
    response = Response(
        id=f"resp_{uuid.uuid4().hex}",
        created_at=int(time.time()),
        status="queued" if body.background else "in_progress",
        background=bool(body.background),
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        metadata=body.metadata or {},
        model=body.model,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        prompt_cache_key=body.prompt_cache_key,
        reasoning={"effort": None, "summary": None, **(body.reasoning or {})},
        safety_identifier=body.safety_identifier,
        store=body.is_stored,
        temperature=params.temperature,
        text={"format": {"type": "text"}, **(body.text or {})},
        tool_choice=body.tool_choice or "auto",
        tools=body.tools or [],
        truncation=body.truncation or "disabled",
        top_logprobs=body.top_logprobs or 0,
        top_p=params.top_p,
        user=body.user,
    )
    made = ResponseAnswer(response, items, answer, store, owner, seal=body.wants_encrypted)
    if body.background and body.stream:
        made.log = EventLog()
    return made


class ResponseAnswer:
    """Turns a chat answer into a response, which it stores at its end."""

    writer: EventWriter | None = None

    def __init__(
        self,
        response: Response,
        items: list[dict[str, Any]],
        answer: ChatAnswer,
        store: ResponseStore,
        owner: str,
        *,
        seal: bool = False,
    ) -> None:
        self.id = response.id
        self.response = response
        # The events of a streamed response in the background.
        self.log: EventLog | None = None
        self.items = items
        self._answer = answer
        self._store = store
        self._owner = owner
        self._builder = OutputBuilder(seal=seal)
        self._num_events = 0

    async def collect(self) -> Response:
        """The whole response."""
        await self._collect()
        await self._save()
        return self.response

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The events in OpenAI's order; none before the engine's first token, so that a refusal is no stream.

        A failure later on ends the stream with ``response.failed``.
        """
        begun = False
        try:
            async with aclosing(self._growth()) as growth:
                async for events in growth:
                    if not begun:
                        begun = True
                        yield self._event("created", response=self.response)
                        yield self._event("in_progress", response=self.response)
                    for name, fields in events:
                        yield self._event(name, **fields)
            await self._save()
        except TwofoldError as error:
            if not begun:
                raise
            self._fail(error)
        yield self._event(self.response.status, response=self.response)

    async def run_in_background(self) -> None:
        """Compute a response that has been stored as queued, and store its end and its events."""
        log = self.log
        if log is not None:
            log.extend([self._event(name, response=self.response) for name in ("created", "queued")])
        self.response.status = "in_progress"
        await self._store.update(self.response)
        if log is None:
            await self._collect()
        else:
            log.extend([self._event("in_progress", response=self.response)])
            async with aclosing(self._growth()) as growth:
                async for events in growth:
                    log.extend([self._event(name, **fields) for name, fields in events])
        await self._end_background()

    async def give_up(self, error: Exception) -> None:
        """Store that a response in the background has failed."""
        self._fail(error)
        await self._end_background()

    async def cancel(self) -> None:
        """Store that a response in the background, whose work has been ended, was cancelled, unless it was complete."""
        if self.response.status in UNFINISHED:
            self.response.output = self._builder.items
            self.response.status = "cancelled"
        await self._end_background()

    async def _end_background(self) -> None:
        """Store the end before a client reads it."""
        if self.log is None:
            await self._store.update(self.response)
            return
        # A cancelled attempt to store the end may have used up a number.
        self._num_events = len(self.log.events)
        last = self._event(self.response.status, response=self.response)
        await self._store.save_events(self.id, [*self.log.events, last])
        await self._store.update(self.response)
        self.log.extend([last])

    async def _growth(self) -> AsyncGenerator[list[Event], None]:
        """What each chunk adds to the output, none for one that shows nothing; the response is complete afterwards."""
        async with aclosing(self._answer.chunks()) as chunks:
            async for chunk in chunks:
                yield self._take(chunk)
        yield self._builder.close()
        self._complete()

    async def save(self) -> None:
        """Store the response as it is now."""
        await self._store.save(self._owner, self.response, self.items)

    @property
    def num_input_tokens(self) -> int:
        return self._answer.num_prompt_tokens

    async def _collect(self) -> None:
        async with aclosing(self._growth()) as growth:
            async for _ in growth:
                pass

    def _take(self, chunk: Any) -> list[Event]:
        if isinstance(chunk.usage, Usage):
            self.response.usage = _usage(chunk.usage)
        return [event for choice in chunk.choices for event in self._builder.feed(choice)]

    def _complete(self) -> None:
        self.response.output = self._builder.items
        self.response.status = "completed"
        self.response.completed_at = int(time.time())
        if self._builder.finish_reason == "length":
            self.response.status = "incomplete"
            self.response.incomplete_details = IncompleteDetails(reason="max_output_tokens")

    def _fail(self, error: Exception) -> None:
        self.response.output = self._builder.items
        self.response.status = "failed"
        self.response.error = ResponseError(code="server_error", message=error_reply(error).message)

    async def _save(self) -> None:
        if self.response.store:
            await self.save()

    def _event(self, name: str, /, **fields: Any) -> bytes:
        kind = f"response.{name}"
        payload = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return b"event: %s\ndata: %s\n\n" % (kind.encode(), msgspec.json.encode(payload))


def _usage(usage: Usage) -> ResponseUsage:
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokensDetails(cached_tokens=usage.prompt_tokens_details.cached_tokens),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputTokensDetails(reasoning_tokens=usage.completion_tokens_details.reasoning_tokens),
        total_tokens=usage.total_tokens,
    )


def _renamed(error: RequestError) -> RequestError:
    """The same error about the field as the client of this API wrote it."""
    if error.param is None:
        return error
    name = error.param.split("[")[0].split(".")[0]
    param = _NAMES.get(name, error.param)
    if isinstance(error, ContextLengthError):
        return ContextLengthError(str(error), param=param)
    return RequestError(str(error), param=param, code=error.code)
