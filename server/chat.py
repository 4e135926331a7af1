"""``POST /v1/chat/completions``."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ..engine.client import AsyncEngineClient
from ..engine.messages import EngineRequest
from ..engine.outputs import SampleDelta
from ..engine.sampling_params import SamplingParams
from ..errors import ContextLengthError, RequestError
from .answer import answer_request
from .chat_choice import ChatChoiceState
from .chat_reading import ChatReading
from .chat_schema import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatRequest,
    Delta,
    TokenEntry,
)
from .generation import Generation
from .logprobs import TokenTexts, chat_entries, prompt_logprobs
from .prompts import render_chat
from .sampling import sampling_fields
from .schema import Usage
from .sse import EventWriter, TextEvent, event
from .state import ServerState


async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation, ``n`` times, at once or as a stream of events."""
    return await answer_request(request, ChatRequest, prepare_chat)


async def prepare_chat(state: ServerState, body: ChatRequest, arrival: float) -> ChatAnswer:
    """The answer to a checked body; other APIs turn their requests into such bodies."""
    client = state.ready_client()
    reading = ChatReading(body, state.style)
    fields = sampling_fields(body)
    fields["max_tokens"] = body.token_limit()
    if body.logprobs:
        fields["logprobs"] = body.top_logprobs or 0
    prompt = await render_chat(client, body, show_tools=bool(reading.use.tools))
    if not reading.is_plain:
        reading.see_prompt(prompt)
        # In a thread: schemas of tools are compiled to see whether they can be held to.
        fields |= await asyncio.to_thread(reading.fields, fields.get("structured"), client.tokenizer.special_texts)
    params = state.make_params(fields)
    answer_id = f"chatcmpl-{uuid.uuid4().hex}"
    engine_request = await _engine_request(client, body, prompt, params, answer_id)
    generation = Generation(client, [engine_request], state.metrics, arrival)
    shows_special = body.skip_special_tokens is False
    hidden = frozenset() if shows_special else client.tokenizer.special_ids
    return ChatAnswer(answer_id, body, generation, state.token_texts, hidden, reading)


async def _engine_request(
    client: AsyncEngineClient, body: ChatRequest, prompt: str, params: SamplingParams, answer_id: str
) -> EngineRequest:
    """The rendered conversation as a request; its template wrote the special tokens, so none are added by default."""
    options: dict[str, Any] = {"cache_salt": body.cache_salt, "add_special_tokens": bool(body.add_special_tokens)}
    try:
        return await client.make_request(prompt, params, request_id=answer_id, **options)
    except RequestError as error:
        if error.param != "prompt":
            raise
        if isinstance(error, ContextLengthError):
            raise ContextLengthError(str(error), param="messages") from None
        raise RequestError(str(error), param="messages", code=error.code) from None


class ChatAnswer:
    """Shapes one generation as chat completions, whole or in chunks."""

    def __init__(
        self,
        answer_id: str,
        body: ChatRequest,
        generation: Generation,
        tokens: TokenTexts,
        hidden: frozenset[int],
        reading: ChatReading,
    ) -> None:
        self.id = answer_id
        self._body = body
        self._generation = generation
        self._tokens = tokens
        self._hidden = hidden
        self._created = int(time.time())
        self.writer = EventWriter()
        self._reading = reading
        self._usage: Any = None if body.include_usage else msgspec.UNSET

    @property
    def params(self) -> SamplingParams:
        """How its tokens are drawn."""
        return self._generation.requests[0].params

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the rendered conversation."""
        return len(self._generation.requests[0].prompt_token_ids)

    async def collect(self) -> ChatCompletion:
        """The whole answer."""
        choices = self._states()
        shown: Any = msgspec.UNSET
        async with aclosing(self._generation.deltas()) as deltas:
            async for index, delta in deltas:
                choices[index].take(delta, self._entries(delta))
                if delta.prompt_logprobs is not None and self._body.prompt_logprobs is not None:
                    shown = prompt_logprobs(self._tokens, delta.prompt_logprobs, self._body.prompt_logprobs)
        return ChatCompletion(
            id=self.id,
            created=self._created,
            model=self._body.model,
            choices=[
                ChatChoice(
                    index=index,
                    message=choice.message(),
                    logprobs=ChatLogprobs(content=choice.entries) if self._body.logprobs else None,
                    finish_reason=choice.finish_reason,
                    stop_reason=choice.stop_reason,
                )
                for index, choice in enumerate(choices)
            ],
            usage=self._final_usage(choices),
            prompt_logprobs=shown,
        )

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The chunks as server-sent events."""
        states = self._states()
        begun: set[int] = set()
        texts: dict[int, TextEvent] = {}
        is_plain = self._reading.is_plain and not self._body.logprobs and not self._body.continuous_usage

        def direct(index: int, delta: SampleDelta) -> bool:
            text = texts.get(index)
            return text is not None and (not delta.text or self.writer.write(text(delta.text)))

        async with aclosing(self._generation.deltas(direct)) as deltas:
            async for index, delta in deltas:
                if is_plain and index in begun and delta.finish_reason is None:
                    if not delta.text:
                        continue
                    if index not in texts:
                        texts[index] = self._text_event(index)
                    yield texts[index](delta.text)
                    continue
                for chunk in self._chunks(index, delta, states[index], begun):
                    yield event(msgspec.json.encode(chunk))
        if self._body.include_usage:
            yield event(msgspec.json.encode(self._last_chunk(states)))

    def _text_event(self, index: int) -> TextEvent:
        return TextEvent(lambda text: self._chunk(ChatChunkChoice(index=index, delta=Delta(content=text))))

    async def chunks(self) -> AsyncGenerator[ChatChunk, None]:
        """Per choice: the role, the text in pieces, one last chunk with finish_reason; then the usage if asked."""
        begun: set[int] = set()
        states = self._states()
        async with aclosing(self._generation.deltas()) as deltas:
            async for index, delta in deltas:
                for chunk in self._chunks(index, delta, states[index], begun):
                    yield chunk
        if self._body.include_usage:
            yield self._last_chunk(states)

    def _chunks(self, index: int, delta: SampleDelta, state: ChatChoiceState, begun: set[int]) -> Iterator[ChatChunk]:
        if index not in begun:
            begun.add(index)
            yield self._chunk(ChatChunkChoice(index=index, delta=Delta(role="assistant", content="")))
        for choice in self._chunk_choices(index, delta, state):
            yield self._chunk(choice)

    def _last_chunk(self, states: list[ChatChoiceState]) -> ChatChunk:
        return ChatChunk(
            id=self.id, created=self._created, model=self._body.model, choices=[], usage=self._final_usage(states)
        )

    def _final_usage(self, states: list[ChatChoiceState]) -> Usage:
        count = self._reading.num_thought_tokens
        num_thoughts = sum(count(state.token_ids, self._tokens.raw) for state in states)
        return self._generation.usage(reasoning_tokens=num_thoughts)

    def _states(self) -> list[ChatChoiceState]:
        show_thoughts = self._body.include_reasoning is not False
        readers = [
            None if self._reading.is_plain else self._reading.reader() for _ in range(self._generation.num_choices)
        ]
        return [ChatChoiceState(reader, show_thoughts=show_thoughts) for reader in readers]

    def _chunk_choices(self, index: int, delta: SampleDelta, state: ChatChoiceState) -> list[ChatChunkChoice]:
        entries = self._entries(delta)
        deltas = state.take(delta, entries)
        if entries and not deltas:
            deltas = [Delta(content="") if self._reading.is_plain else Delta()]
        choices = [ChatChunkChoice(index=index, delta=made) for made in deltas]
        if self._body.logprobs and choices:
            choices[0].logprobs = ChatLogprobs(content=entries)
        if delta.finish_reason is not None:
            last = ChatChunkChoice(
                index=index, delta=Delta(), finish_reason=state.finish_reason, stop_reason=delta.stop_reason
            )
            choices.append(last)
        return choices

    def _chunk(self, choice: ChatChunkChoice) -> ChatChunk:
        if self._body.continuous_usage:
            self._usage = self._generation.usage()
        return ChatChunk(id=self.id, created=self._created, model=self._body.model, choices=[choice], usage=self._usage)

    def _entries(self, delta: SampleDelta) -> list[TokenEntry]:
        if not self._body.logprobs or not delta.logprobs:
            return []
        return chat_entries(self._tokens, delta.logprobs, self._body.top_logprobs or 0, self._hidden)
