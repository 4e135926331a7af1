"""One choice of a chat answer while it grows: from the engine's deltas to those of the API."""

from __future__ import annotations

import uuid
from typing import Any

import msgspec

from ..engine.outputs import SampleDelta
from .answer_reader import AnswerReader
from .chat_schema import AnswerMessage, Delta, FunctionCall, FunctionDelta, TokenEntry, ToolCall, ToolCallDelta
from .tools.events import CallArguments, CallStart, Event, Text


class ChatChoiceState:
    """``reader`` None: all text is content. ``show_thoughts`` False leaves thoughts out."""

    def __init__(self, reader: AnswerReader | None, *, show_thoughts: bool = True) -> None:
        self._reader = reader
        self._show_thoughts = show_thoughts
        self._content: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[ToolCall] = []
        self.entries: list[TokenEntry] = []
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None

    def take(self, delta: SampleDelta, entries: list[TokenEntry]) -> list[Delta]:
        """What one delta of the engine adds, in order."""
        self.entries += entries
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
        reader = self._reader
        if reader is None:
            self._content.append(delta.text)
            return [Delta(content=delta.text)] if delta.text else []
        self.token_ids += delta.token_ids
        events = reader.push(delta.text)
        if delta.finish_reason is not None:
            events += reader.finish()
            if delta.finish_reason == "stop" and reader.has_calls:
                self.finish_reason = "tool_calls"
        return [made for event in events if (made := self._delta(event)) is not None]

    def message(self) -> AnswerMessage:
        """The whole message; content is null beside calls where there is no text."""
        content = "".join(self._content)
        thoughts: Any = "".join(self._thoughts) or msgspec.UNSET
        return AnswerMessage(
            content=content if content or not self._calls else None,
            reasoning_content=thoughts,
            reasoning=thoughts,
            tool_calls=self._calls or msgspec.UNSET,
        )

    def _delta(self, event: Event) -> Delta | None:
        if isinstance(event, Text):
            self._content.append(event.text)
            return Delta(content=event.text)
        if isinstance(event, CallStart):
            call = ToolCall(id=f"call_{uuid.uuid4().hex[:24]}", function=FunctionCall(name=event.name))
            self._calls.append(call)
            function = FunctionDelta(name=event.name, arguments="")
            index = len(self._calls) - 1
            return Delta(tool_calls=[ToolCallDelta(index=index, id=call.id, type="function", function=function)])
        if isinstance(event, CallArguments):
            self._calls[-1].function.arguments += event.text
            function = FunctionDelta(arguments=event.text)
            return Delta(tool_calls=[ToolCallDelta(index=len(self._calls) - 1, function=function)])
        if not self._show_thoughts:
            return None
        self._thoughts.append(event.text)
        return Delta(reasoning_content=event.text, reasoning=event.text)
