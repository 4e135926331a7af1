"""Qwen3-Coder's calls: ``<function=NAME>`` and a ``<parameter=KEY>`` for each argument, inside ``<tool_call>``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .events import CallArguments, CallStart, Event, Text
from .scanning import Buffer
from .values import argument_pair

START, END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"


class QwenCoderParser:
    """``tools`` maps each tool's name to the schema of its parameters.

    A value is told when it is whole, for until then it is not known whether it is JSON. Models leave out the outer
    marks now and then; a call is read without them too.
    """

    def __init__(self, tools: Mapping[str, Mapping[str, Any]]) -> None:
        self._tools = tools
        self._buffer = Buffer()
        self._state = "text"
        self._opened = self._head = self._name = self._key = self._value = ""
        self._num_arguments = 0

    def push(self, text: str) -> list[Event]:
        """Events that ``text`` makes certain."""
        self._buffer.text += text
        events: list[Event] = []
        steps = {"text": self._in_text, "opened": self._in_opened, "name": self._in_name, "body": self._in_body}
        steps |= {"key": self._in_key, "value": self._in_value, "closed": self._in_closed}
        while self._buffer.text and steps[self._state](events):
            pass
        return events

    def finish(self) -> list[Event]:
        """What waited; of a call that was cut off, what is whole."""
        rest = self._buffer.take_all()
        if self._state in ("text", "closed"):
            return [Text(rest)]
        return [Text(self._opened + self._head + rest)] if self._state in ("opened", "name") else []

    def _in_text(self, events: list[Event]) -> bool:
        before, mark = self._buffer.take_until((START, FUNCTION))
        events.append(Text(before))
        if mark is not None:
            self._opened, self._head = mark, ""
            self._state = "opened" if mark == START else "name"
        return mark is not None

    def _in_opened(self, events: list[Event]) -> bool:
        """After the outer mark: a function, or what is no call."""
        text = self._buffer.text.lstrip()
        if text.startswith(FUNCTION):
            self._opened += self._buffer.take(len(self._buffer.text) - len(text) + len(FUNCTION))
            self._state = "name"
            return True
        if FUNCTION.startswith(text):
            return False
        events.append(Text(self._opened))
        self._state = "text"
        return True

    def _in_name(self, events: list[Event]) -> bool:
        before, mark = self._buffer.take_until((">",))
        self._head += before
        if mark is None:
            return False
        self._name = self._head.strip()
        if self._name not in self._tools:
            events.append(Text(self._opened + self._head + mark))
            self._state = "text"
            return True
        events += [CallStart(self._name), CallArguments("{")]
        self._num_arguments, self._state = 0, "body"
        return True

    def _in_body(self, events: list[Event]) -> bool:
        _, mark = self._buffer.take_until((PARAMETER, FUNCTION_END, END))
        if mark == PARAMETER:
            self._state, self._value = "key", ""
        elif mark is not None:
            events.append(CallArguments("}"))
            self._state = "closed" if mark == FUNCTION_END else "text"
        return mark is not None

    def _in_key(self, events: list[Event]) -> bool:
        before, mark = self._buffer.take_until((">",))
        self._value += before
        if mark is not None:
            self._key, self._value, self._state = self._value.strip(), "", "value"
        return mark is not None

    def _in_value(self, events: list[Event]) -> bool:
        before, mark = self._buffer.take_until((PARAMETER_END,))
        self._value += before
        if mark is None:
            return False
        # One line break on either side belongs to the layout.
        value = self._value.removeprefix("\n").removesuffix("\n")
        parameters, first = self._tools[self._name], self._num_arguments == 0
        self._num_arguments += 1
        events.append(CallArguments(argument_pair(parameters, self._key, value, first=first)))
        self._state = "body"
        return True

    def _in_closed(self, events: list[Event]) -> bool:
        """After a call: the end of the outer mark, where there is one."""
        text = self._buffer.text.lstrip()
        if text.startswith(END):
            self._buffer.take(len(self._buffer.text) - len(text) + len(END))
        elif END.startswith(text):
            return False
        self._state = "text"
        return True
