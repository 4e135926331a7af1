"""``POST /v1/chat/completions``."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
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
from .chat_schema import (
    AnswerMessage,
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
from .sse import event
from .state import ServerState


async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation, ``n`` times, at once or as a stream of events."""
    return await answer_request(request, ChatRequest, prepare_chat)


async def prepare_chat(state: ServerState, body: ChatRequest, arrival: float) -> ChatAnswer:
    """The answer to a checked body; other APIs turn their requests into such bodies."""
    client = state.ready_client()
    fields = sampling_fields(body)
    fields["max_tokens"] = body.token_limit()
    if body.logprobs:
        fields["logprobs"] = body.top_logprobs or 0
    params = state.make_params(fields)
    answer_id = f"chatcmpl-{uuid.uuid4().hex}"
    engine_request = await _engine_request(client, body, params, answer_id)
    generation = Generation(client, [engine_request], state.metrics, arrival)
    hidden = client.tokenizer.special_ids if params.skip_special_tokens else frozenset()
    return ChatAnswer(answer_id, body, generation, state.token_texts, hidden)


async def _engine_request(
    client: AsyncEngineClient, body: ChatRequest, params: SamplingParams, answer_id: str
) -> EngineRequest:
    """The rendered conversation as a request; its template wrote the special tokens, so none are added by default."""
    prompt = await render_chat(client, body)
    options: dict[str, Any] = {"cache_salt": body.cache_salt, "add_special_tokens": bool(body.add_special_tokens)}
    try:
        return await client.make_request(prompt, params, request_id=answer_id, **options)
    except RequestError as error:
        if error.param != "prompt":
            raise
        if isinstance(error, ContextLengthError):
            raise ContextLengthError(str(error), param="messages") from None
        raise RequestError(str(error), param="messages", code=error.code) from None


@dataclass
class _Collected:
    """One choice while it grows."""

    texts: list[str] = field(default_factory=list)
    entries: list[TokenEntry] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class ChatAnswer:
    """Shapes one generation as chat completions, whole or in chunks."""

    def __init__(
        self,
        answer_id: str,
        body: ChatRequest,
        generation: Generation,
        tokens: TokenTexts,
        hidden: frozenset[int],
    ) -> None:
        self.id = answer_id
        self._body = body
        self._generation = generation
        self._tokens = tokens
        self._hidden = hidden
        self._created = int(time.time())
        self._usage: Any = None if body.include_usage else msgspec.UNSET

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the rendered conversation."""
        return len(self._generation.requests[0].prompt_token_ids)

    async def collect(self) -> ChatCompletion:
        """The whole answer."""
        choices = [_Collected() for _ in range(self._generation.num_choices)]
        shown: Any = msgspec.UNSET
        async with aclosing(self._generation.deltas()) as deltas:
            async for index, delta in deltas:
                choice = choices[index]
                choice.texts.append(delta.text)
                choice.entries += self._entries(delta)
                choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason
                if delta.prompt_logprobs is not None and self._body.prompt_logprobs is not None:
                    shown = prompt_logprobs(self._tokens, delta.prompt_logprobs, self._body.prompt_logprobs)
        return ChatCompletion(
            id=self.id,
            created=self._created,
            model=self._body.model,
            choices=[
                ChatChoice(
                    index=index,
                    message=AnswerMessage(content="".join(choice.texts)),
                    logprobs=ChatLogprobs(content=choice.entries) if self._body.logprobs else None,
                    finish_reason=choice.finish_reason,
                    stop_reason=choice.stop_reason,
                )
                for index, choice in enumerate(choices)
            ],
            usage=self._generation.usage(),
            prompt_logprobs=shown,
        )

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The chunks as server-sent events."""
        async with aclosing(self.chunks()) as chunks:
            async for chunk in chunks:
                yield event(msgspec.json.encode(chunk))

    async def chunks(self) -> AsyncGenerator[ChatChunk, None]:
        """Per choice: the role, the text in pieces, one last chunk with finish_reason; then the usage if asked."""
        begun: set[int] = set()
        async with aclosing(self._generation.deltas()) as deltas:
            async for index, delta in deltas:
                if index not in begun:
                    begun.add(index)
                    yield self._chunk(ChatChunkChoice(index=index, delta=Delta(role="assistant", content="")))
                for choice in self._chunk_choices(index, delta):
                    yield self._chunk(choice)
        if self._body.include_usage:
            yield ChatChunk(
                id=self.id, created=self._created, model=self._body.model, choices=[], usage=self._generation.usage()
            )

    def _chunk_choices(self, index: int, delta: SampleDelta) -> list[ChatChunkChoice]:
        choices = []
        entries = self._entries(delta)
        if delta.text or entries:
            logprobs = ChatLogprobs(content=entries) if self._body.logprobs else None
            choices.append(ChatChunkChoice(index=index, delta=Delta(content=delta.text), logprobs=logprobs))
        if delta.finish_reason is not None:
            last = ChatChunkChoice(
                index=index, delta=Delta(), finish_reason=delta.finish_reason, stop_reason=delta.stop_reason
            )
            choices.append(last)
        return choices

    def _chunk(self, choice: ChatChunkChoice) -> ChatChunk:
        return ChatChunk(id=self.id, created=self._created, model=self._body.model, choices=[choice], usage=self._usage)

    def _entries(self, delta: SampleDelta) -> list[TokenEntry]:
        if not self._body.logprobs or not delta.logprobs:
            return []
        return chat_entries(self._tokens, delta.logprobs, self._body.top_logprobs or 0, self._hidden)
