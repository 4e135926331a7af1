"""One message in the making: whole, or as a stream of events."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec

from ..chat import ChatAnswer, prepare_chat
from ..chat_schema import ChatChunkChoice, ToolCallDelta
from ..schema import Usage
from ..sse import EventWriter
from ..state import ServerState
from .conversation import chat_request
from .schema import (
    AnthropicMessage,
    Block,
    CountTokensRequest,
    MessageTokensDetails,
    MessageUsage,
    TextBlock,
    ThinkingBlock,
    ToolUseBlock,
)

Event = tuple[str, dict[str, Any]]

_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}


async def prepare_message(state: ServerState, body: CountTokensRequest, arrival: float) -> MessageAnswer:
    """Check everything that can be checked before the engine is asked (RequestError, ContextLengthError)."""
    state.ready_client()
    chat = chat_request(body, thinks=state.style.thoughts is not None)
    chat.check()
    answer = await prepare_chat(state, chat, arrival)
    return MessageAnswer(body.model, answer)


class MessageAnswer:
    """Turns a chat answer into a message."""

    writer: EventWriter | None = None

    def __init__(self, model: str, answer: ChatAnswer) -> None:
        self.id = f"msg_{uuid.uuid4().hex}"
        self._answer = answer
        usage = MessageUsage(input_tokens=answer.num_prompt_tokens)
        self.message = AnthropicMessage(id=self.id, model=model, usage=usage)
        self._blocks: list[Block] = []
        self._arguments = ""
        self._call_index: int | None = None

    async def collect(self) -> AnthropicMessage:
        """The whole message."""
        async with aclosing(self._answer.chunks()) as chunks:
            async for chunk in chunks:
                self._take(chunk)
        self._close()
        self.message.content = self._blocks
        return self.message

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The events in Anthropic's order; none before the engine's first token, so that a refusal is no stream."""
        begun = False
        async with aclosing(self._answer.chunks()) as chunks:
            async for chunk in chunks:
                if not begun:
                    begun = True
                    yield _event("message_start", message=self.message)
                for name, fields in self._take(chunk):
                    yield _event(name, **fields)
        for name, fields in self._close():
            yield _event(name, **fields)
        delta = {"stop_reason": self.message.stop_reason, "stop_sequence": self.message.stop_sequence}
        yield _event("message_delta", delta=delta, usage=self.message.usage)
        yield _event("message_stop")

    def _take(self, chunk: Any) -> list[Event]:
        if isinstance(chunk.usage, Usage):
            self.message.usage = _usage(chunk.usage)
        return [event for choice in chunk.choices for event in self._choice(choice)]

    def _choice(self, choice: ChatChunkChoice) -> list[Event]:
        events: list[Event] = []
        delta = choice.delta
        if delta.reasoning_content:
            events += self._add(ThinkingBlock, "thinking", "thinking_delta", delta.reasoning_content)
        if delta.content:
            events += self._add(TextBlock, "text", "text_delta", delta.content)
        for call in delta.tool_calls or ():
            events += self._call(call)
        if choice.finish_reason is not None:
            self.message.stop_reason = _STOP_REASONS.get(choice.finish_reason, "end_turn")
            if choice.finish_reason == "stop" and isinstance(choice.stop_reason, str):
                self.message.stop_reason, self.message.stop_sequence = "stop_sequence", choice.stop_reason
        return events

    def _add(self, kind: type[TextBlock] | type[ThinkingBlock], field: str, delta: str, text: str) -> list[Event]:
        events = [] if self._blocks and isinstance(self._blocks[-1], kind) else self._begin(kind())
        block = self._blocks[-1]
        setattr(block, field, getattr(block, field) + text)
        return [*events, self._delta(delta, field, text)]

    def _call(self, call: ToolCallDelta) -> list[Event]:
        """One delta of a tool call: the first of an index has its id and name, the others more of its arguments."""
        events: list[Event] = []
        if call.index != self._call_index:
            events = self._begin(ToolUseBlock(id=str(call.id), name=str(call.function.name)))
            self._call_index = call.index
        if call.function.arguments:
            self._arguments += call.function.arguments
            events.append(self._delta("input_json_delta", "partial_json", call.function.arguments))
        return events

    def _begin(self, block: Block) -> list[Event]:
        events = self._close_block()
        self._blocks.append(block)
        # A copy: the block grows before its event is written.
        start = {"index": len(self._blocks) - 1, "content_block": msgspec.structs.replace(block)}
        return [*events, ("content_block_start", start)]

    def _delta(self, kind: str, field: str, text: str) -> Event:
        return "content_block_delta", {"index": len(self._blocks) - 1, "delta": {"type": kind, field: text}}

    def _close_block(self) -> list[Event]:
        if not self._blocks:
            return []
        block = self._blocks[-1]
        if isinstance(block, ToolUseBlock):
            block.input = _arguments(self._arguments)
            self._arguments = ""
        return [("content_block_stop", {"index": len(self._blocks) - 1})]

    def _close(self) -> list[Event]:
        """End the last block; a message without any gets an empty text."""
        events = [] if self._blocks else self._begin(TextBlock())
        return events + self._close_block()


def _event(name: str, /, **fields: Any) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), msgspec.json.encode({"type": name, **fields}))


def _usage(usage: Usage) -> MessageUsage:
    cached = usage.prompt_tokens_details.cached_tokens
    return MessageUsage(
        input_tokens=usage.prompt_tokens - cached,
        cache_read_input_tokens=cached,
        output_tokens=usage.completion_tokens,
        output_tokens_details=MessageTokensDetails(thinking_tokens=usage.completion_tokens_details.reasoning_tokens),
    )


def _arguments(text: str) -> Any:
    """A call's arguments as an object; those that max_tokens cut off are no JSON, and are left out."""
    try:
        return json.loads(text or "{}")
    except ValueError:
        return {}
