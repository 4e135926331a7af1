"""gpt-oss's channels: thoughts, text and calls as messages of their own, each behind a header."""

from __future__ import annotations

import re
from collections.abc import Collection

from .events import CallArguments, CallStart, Event, Text, Thought
from .scanning import Buffer

CHANNEL, MESSAGE, START, CONSTRAIN = "<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", START, CHANNEL)
_RECIPIENT = re.compile(r"to=functions\.([^\s<]+)")


class HarmonyParser:
    """Reads what follows ``<|start|>assistant``. Text before the first mark is text for the user.

    ``names`` are the tools that may be called; a message to another one is text.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._buffer = Buffer()
        self._header = ""
        self._in_header = False
        self._kind: type[Text] | type[Thought] | type[CallArguments] = Text

    def push(self, text: str) -> list[Event]:
        """Events that ``text`` makes certain."""
        self._buffer.text += text
        events: list[Event] = []
        while self._buffer.text and (self._read_header(events) if self._in_header else self._read_body(events)):
            pass
        return events

    def finish(self) -> list[Event]:
        """What waited; a header without a message says nothing."""
        rest = self._buffer.take_all()
        return [] if self._in_header else [self._kind(rest)]

    def _read_header(self, events: list[Event]) -> bool:
        before, mark = self._buffer.take_until((MESSAGE,))
        self._header += before
        if mark is None:
            return False
        self._in_header = False
        recipient = _RECIPIENT.search(self._header)
        if recipient is not None and recipient[1] in self._names:
            self._kind = CallArguments
            events.append(CallStart(recipient[1]))
        elif f"{CHANNEL}analysis" in self._header:
            self._kind = Thought
        else:
            self._kind = Text
        return True

    def _read_body(self, events: list[Event]) -> bool:
        before, mark = self._buffer.take_until(_ENDS)
        events.append(self._kind(before))
        if mark is None:
            return False
        self._kind = Text
        if mark in (START, CHANNEL):
            self._in_header, self._header = True, mark
        return True
