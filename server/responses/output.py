"""From chat chunks to output items, with the events that tell a client how they grow."""

from __future__ import annotations

import uuid
from typing import Any

import msgspec

from ..chat_schema import ChatChunkChoice, ToolCallDelta
from .conversation import seal_thoughts
from .schema import FunctionCallItem, MessageItem, OutputItem, OutputText, ReasoningItem, ReasoningText

Event = tuple[str, dict[str, Any]]


class OutputBuilder:
    """Grows ``items``; each method returns the events of what it did, names without ``response.`` before them.

    ``seal``: reasoning items get their thoughts as ``encrypted_content`` too.
    """

    def __init__(self, *, seal: bool = False) -> None:
        self._seal = seal
        self.items: list[OutputItem] = []
        self.finish_reason: str | None = None
        self._open: OutputItem | None = None
        self._call_index: int | None = None

    def feed(self, choice: ChatChunkChoice) -> list[Event]:
        """Take in one chunk's choice."""
        events: list[Event] = []
        delta = choice.delta
        if delta.reasoning_content:
            events += self._reasoning(delta.reasoning_content)
        content = delta.content
        logprobs = choice.logprobs.content if choice.logprobs is not None else None
        if content or logprobs:
            events += self._text(content or "", logprobs or [])
        for call in delta.tool_calls or ():
            events += self._call(call)
        self.finish_reason = choice.finish_reason or self.finish_reason
        return events

    def close(self) -> list[Event]:
        """End the last item; an answer without any item gets an empty message."""
        events: list[Event] = []
        if not self.items:
            events += self._begin_text()
        return events + self._end("incomplete" if self.finish_reason == "length" else "completed")

    def _reasoning(self, text: str) -> list[Event]:
        events: list[Event] = []
        if not isinstance(self._open, ReasoningItem):
            events += self._begin(ReasoningItem(id=_new_id("rs")))
            assert isinstance(self._open, ReasoningItem)
            self._open.content = [ReasoningText()]
            events.append(("content_part.added", {**self._part(), "part": ReasoningText()}))
        assert isinstance(self._open, ReasoningItem)
        self._open.content[0].text += text
        return [*events, ("reasoning_text.delta", {**self._part(), "delta": text})]

    def _text(self, text: str, logprobs: list[Any]) -> list[Event]:
        events = [] if isinstance(self._open, MessageItem) else self._begin_text()
        assert isinstance(self._open, MessageItem)
        part = self._open.content[0]
        part.text += text
        part.logprobs = [*part.logprobs, *logprobs]
        return [*events, ("output_text.delta", {**self._part(), "delta": text, "logprobs": logprobs})]

    def _begin_text(self) -> list[Event]:
        events = self._begin(MessageItem(id=_new_id("msg")))
        assert isinstance(self._open, MessageItem)
        self._open.content = [OutputText()]
        return [*events, ("content_part.added", {**self._part(), "part": OutputText()})]

    def _call(self, call: ToolCallDelta) -> list[Event]:
        """One delta of a tool call: the first of an index has its id and name, the others more of its arguments."""
        events: list[Event] = []
        function = call.function
        if call.index != self._call_index:
            self._call_index = call.index
            item = FunctionCallItem(id=_new_id("fc"), call_id=str(call.id), name=str(function.name))
            events += self._begin(item)
        assert isinstance(self._open, FunctionCallItem)
        if function.arguments:
            self._open.arguments += function.arguments
            events.append(("function_call_arguments.delta", {**self._place(), "delta": function.arguments}))
        return events

    def _begin(self, item: OutputItem) -> list[Event]:
        events = self._end("completed")
        self.items.append(item)
        self._open = item
        # A copy: the item grows before its event is written.
        return [*events, ("output_item.added", {"output_index": self._index, "item": msgspec.structs.replace(item)})]

    def _end(self, status: str) -> list[Event]:
        item = self._open
        if item is None:
            return []
        item.status = status
        events: list[Event] = []
        if isinstance(item, FunctionCallItem):
            done = {**self._place(), "name": item.name, "arguments": item.arguments}
            events.append(("function_call_arguments.done", done))
        elif isinstance(item, MessageItem):
            text = item.content[0]
            events.append(("output_text.done", {**self._part(), "text": text.text, "logprobs": text.logprobs}))
            events.append(("content_part.done", {**self._part(), "part": text}))
        else:
            if self._seal:
                item.encrypted_content = seal_thoughts(item.content[0].text)
            events.append(("reasoning_text.done", {**self._part(), "text": item.content[0].text}))
            events.append(("content_part.done", {**self._part(), "part": item.content[0]}))
        events.append(("output_item.done", {"output_index": self._index, "item": item}))
        self._open = None
        return events

    @property
    def _index(self) -> int:
        return len(self.items) - 1

    def _place(self) -> dict[str, Any]:
        assert self._open is not None
        return {"item_id": self._open.id, "output_index": self._index}

    def _part(self) -> dict[str, Any]:
        return {**self._place(), "content_index": 0}


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
