"""One call as a JSON object, ``{"name": ..., "arguments": {...}}``, read character by character."""

from __future__ import annotations

import enum
import json
from collections.abc import Collection

from .events import CallArguments, CallStart, Event

_SPACE = " \t\r\n"
_ARGUMENTS = ("arguments", "parameters")


class Outcome(enum.Enum):
    """How far a reader is. FAILED: this was no call of a known tool, and its text is in ``raw``."""

    OPEN = enum.auto()
    DONE = enum.auto()
    FAILED = enum.auto()


class _Place(enum.Enum):
    START = enum.auto()
    KEY = enum.auto()
    COLON = enum.auto()
    VALUE = enum.auto()
    COMMA = enum.auto()


class JsonCallReader:
    """Reads one object. ``names`` are the tools that may be called.

    Nothing is told before the name is known, so that an object that is no call can still become text. Once a call has
    begun it cannot be taken back: what follows its arguments is skipped up to the end of the object.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self.outcome = Outcome.OPEN
        self.raw = ""
        self.has_begun = False
        self._place = _Place.START
        self._key = ""
        self._token = ""
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._held: list[str] = []
        self._has_arguments = False

    def push(self, text: str) -> tuple[list[Event], str]:
        """The events of ``text``, and what of it lies behind the object."""
        events: list[Event] = []
        for position, char in enumerate(text):
            if not self.has_begun:
                self.raw += char
            self._read(char, events)
            if self.outcome is not Outcome.OPEN:
                return events, text[position + 1 :]
        return events, ""

    def _read(self, char: str, events: list[Event]) -> None:
        if self._place is _Place.VALUE:
            self._read_value(char, events)
        elif self._place is _Place.KEY and self._token:
            self._token += char
            if self._ends_string(char):
                self._key, self._token = _loads(self._token), ""
                self._place = _Place.COLON
        elif char in _SPACE:
            return
        elif self._place is _Place.START and char == "{":
            self._place = _Place.KEY
        elif self._place is _Place.KEY and char == '"':
            self._token = char
            self._in_string = True
        elif self._place is _Place.COLON and char == ":":
            self._place = _Place.VALUE
            self._token = ""
        elif self._place is _Place.COMMA and char == ",":
            self._place = _Place.KEY
        elif self._place is _Place.COMMA and char == "}":
            self._close(events)
        else:
            self._fail()

    def _read_value(self, char: str, events: list[Event]) -> None:
        """One character of a value: arguments are passed on, a name is kept, others are skipped."""
        if not self._token and char in _SPACE:
            return
        if not self._in_string and self._depth == 0 and char in ",}":
            self._end_value(events)
            self._place = _Place.COMMA
            self._read(char, events)
            return
        first = not self._token
        self._token += char if first or not self._streams else ""
        if self._in_string:
            self._ends_string(char)
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
        if self._streams:
            self._argument(char, events)
        if self._depth == 0 and not self._in_string and char in '"}]':
            self._end_value(events)
            self._place = _Place.COMMA

    @property
    def _streams(self) -> bool:
        """True in arguments that are an object, which need not be complete to be passed on."""
        return self._key in _ARGUMENTS and self._token[:1] == "{"

    def _end_value(self, events: list[Event]) -> None:
        if self._key == "name" and not self.has_begun:
            name = _loads(self._token)
            if name not in self._names:
                self._fail()
                return
            events.append(CallStart(name))
            self.has_begun = True
            events += [CallArguments(text) for text in self._held]
        elif self._key in _ARGUMENTS and not self._streams and not self._has_arguments:
            value = self._token.strip()
            # Some models write the arguments as a JSON text within JSON.
            self._argument(_loads(value) if value[:1] == '"' else "{}" if value == "null" else value, events)
        self._has_arguments |= self._key in _ARGUMENTS
        self._token = ""

    def _argument(self, text: str, events: list[Event]) -> None:
        if self._has_arguments:
            return
        if self.has_begun:
            events.append(CallArguments(text))
        else:
            self._held.append(text)

    def _close(self, events: list[Event]) -> None:
        if not self.has_begun:
            self._fail()
            return
        if not self._has_arguments:
            events.append(CallArguments("{}"))
        self.outcome = Outcome.DONE

    def _fail(self) -> None:
        self.outcome = Outcome.DONE if self.has_begun else Outcome.FAILED

    def _ends_string(self, char: str) -> bool:
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._in_string = False
            return True
        return False


def _loads(text: str) -> str:
    """A JSON string's value; the text itself where it is none."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, str) else text
