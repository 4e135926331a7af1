"""GLM's calls: ``<tool_call>NAME`` and pairs of ``<arg_key>`` and ``<arg_value>``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .events import CallArguments, CallStart, Event, Text
from .scanning import Buffer
from .values import argument_pair

START, END = "<tool_call>", "</tool_call>"
KEY, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"


class GlmParser:
    """``tools`` maps each tool's name to the schema of its parameters: a text stays text where the schema says so.

    A value is told when it is whole, for until then it is not known whether it is JSON.
    """

    def __init__(self, tools: Mapping[str, Mapping[str, Any]]) -> None:
        self._tools = tools
        self._buffer = Buffer()
        self._state = "text"
        self._name = self._key = self._head = self._value = ""
        self._num_arguments = 0

    def push(self, text: str) -> list[Event]:
        """Events that ``text`` makes certain."""
        self._buffer.text += text
        events: list[Event] = []
        steps = {"text": self._in_text, "name": self._in_name, "pairs": self._in_pairs}
        steps |= {"key": self._in_key, "value": self._in_value}
        while self._buffer.text and steps[self._state](events):
            pass
        return events

    def finish(self) -> list[Event]:
        """What waited; of a call that was cut off, what is whole."""
        rest = self._buffer.take_all()
        if self._state == "text":
            return [Text(rest)]
        return [Text(START + self._head + rest)] if self._state == "name" else []

    def _in_text(self, events: list[Event]) -> bool:
        before, mark = self._buffer.take_until((START,))
        events.append(Text(before))
        if mark is not None:
            self._state, self._head = "name", ""
        return mark is not None

    def _in_name(self, events: list[Event]) -> bool:
        before, mark = self._buffer.take_until((KEY, END))
        self._head += before
        if mark is None:
            return False
        self._name = self._head.strip()
        if self._name not in self._tools:
            events.append(Text(START + self._head + mark))
            self._state = "text"
            return True
        events += [CallStart(self._name), CallArguments("{")]
        self._num_arguments = 0
        self._key = ""
        self._after_mark(mark, events)
        return True

    def _in_pairs(self, events: list[Event]) -> bool:
        _, mark = self._buffer.take_until((KEY, VALUE, END))
        if mark is None:
            return False
        self._after_mark(mark, events)
        return True

    def _after_mark(self, mark: str, events: list[Event]) -> None:
        if mark == END:
            events.append(CallArguments("}"))
            self._state = "text"
        else:
            self._state, self._value = ("key" if mark == KEY else "value"), ""

    def _in_key(self, events: list[Event]) -> bool:
        before, mark = self._buffer.take_until((KEY_END,))
        self._value += before
        if mark is not None:
            self._key, self._state = self._value.strip(), "pairs"
        return mark is not None

    def _in_value(self, events: list[Event]) -> bool:
        before, mark = self._buffer.take_until((VALUE_END,))
        self._value += before
        if mark is None:
            return False
        parameters, first = self._tools[self._name], self._num_arguments == 0
        self._num_arguments += 1
        events.append(CallArguments(argument_pair(parameters, self._key, self._value, first=first)))
        self._state = "pairs"
        return True
