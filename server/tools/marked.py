"""Calls between marks, as most models write them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from .events import CallArguments, CallStart, Event, Text
from .json_call import JsonCallReader, Outcome
from .scanning import Buffer

_SEPARATORS = "[],; \t\r\n"
_AROUND_JSON = "` \t\r\n"


class MarkedJsonParser:
    """Text in which each of ``starts`` begins JSON calls, one or an array of them, that one of ``ends`` closes.

    Separators between calls (``;``, ``,``, brackets, white space) are skipped. What is no call of a known tool stays
    text, its marks included. Without ``starts`` only calls at the very beginning count.
    """

    def __init__(self, names: Collection[str], starts: Sequence[str], ends: Sequence[str] = ()) -> None:
        self._names = names
        self._starts = tuple(starts)
        self._ends = tuple(ends)
        self._buffer = Buffer()
        self._reader: JsonCallReader | None = None
        # Text that turns out to be a mark, or stays text: the start and the separators before the first call.
        self._prefix = ""
        self._expecting = not starts
        self._state = "text" if starts else "calls"

    def push(self, text: str) -> list[Event]:
        """Events that ``text`` makes certain."""
        self._buffer.text += text
        events: list[Event] = []
        while self._buffer.text and self._step(events):
            pass
        return events

    def finish(self) -> list[Event]:
        """What waited: the text of a call that never got a name, or the beginning of a mark."""
        rest = self._buffer.take_all()
        reader = self._reader
        if reader is not None:
            return [] if reader.has_begun else [Text(self._prefix + reader.raw + rest)]
        if self._state == "calls" and not self._expecting:
            return []
        return [Text(self._prefix + rest)]

    def _step(self, events: list[Event]) -> bool:
        """Read on; False where more text is needed."""
        if self._reader is not None:
            return self._read_call(self._reader, events)
        if self._state == "calls":
            return self._between(events)
        if not self._starts:
            events.append(Text(self._buffer.take_all()))
            return False
        before, mark = self._buffer.take_until(self._starts)
        events.append(Text(before))
        if mark is None:
            return False
        self._state, self._prefix, self._expecting = "calls", mark, True
        return True

    def _between(self, events: list[Event]) -> bool:
        """Before, between and after calls: separators, the next object, or the end."""
        text = self._buffer.text
        end = next((end for end in self._ends if text.startswith(end)), None)
        if end is not None and not self._expecting:
            self._buffer.take(len(end))
            self._state = "text"
            return True
        if any(end.startswith(text) for end in self._ends) and end is None:
            return False
        if text[0] == "{":
            self._reader = JsonCallReader(self._names)
        elif text[0] in _SEPARATORS:
            skipped = self._buffer.take(1)
            self._prefix += skipped if self._expecting else ""
        else:
            self._back_to_text(events, self._buffer.take(1))
        return True

    def _read_call(self, reader: JsonCallReader, events: list[Event]) -> bool:
        found, self._buffer.text = reader.push(self._buffer.take_all())
        events += found
        if reader.outcome is Outcome.OPEN:
            return False
        self._reader = None
        if reader.outcome is Outcome.DONE:
            self._prefix, self._expecting = "", False
        else:
            self._back_to_text(events, reader.raw)
        return True

    def _back_to_text(self, events: list[Event], text: str) -> None:
        events.append(Text(self._prefix + text))
        self._prefix, self._expecting, self._state = "", False, "text"


class NamedJsonParser:
    """Calls whose name stands outside the JSON: ``start NAME middle {...} end``.

    ``starts`` begin a call; its name ends where one of ``middles`` begins, its arguments where one of ``ends`` does,
    which may be the next start. ``dropped`` marks around all calls are left out.
    """

    def __init__(
        self,
        names: Collection[str],
        *,
        starts: Sequence[str],
        middles: Sequence[str],
        ends: Sequence[str],
        dropped: Sequence[str] = (),
    ) -> None:
        self._names = names
        self._starts, self._middles, self._ends = tuple(starts), tuple(middles), tuple(ends)
        self._dropped = tuple(dropped)
        self._buffer = Buffer()
        self._state = "text"
        self._start = self._head = ""
        self._has_arguments = False
        self._held = ""

    def push(self, text: str) -> list[Event]:
        """Events that ``text`` makes certain."""
        self._buffer.text += text
        events: list[Event] = []
        steps = {"text": self._in_text, "name": self._in_name, "arguments": self._in_arguments}
        while self._buffer.text and steps[self._state](events):
            pass
        return events

    def finish(self) -> list[Event]:
        """What waited."""
        rest = self._buffer.take_all()
        if self._state == "arguments":
            return [CallArguments((self._held + rest).rstrip(_AROUND_JSON))]
        return [Text(self._start + self._head + rest)]

    def _in_text(self, events: list[Event]) -> bool:
        before, mark = self._buffer.take_until((*self._starts, *self._dropped))
        events.append(Text(before))
        if mark in self._starts:
            self._begin(mark or "")
        return mark is not None

    def _begin(self, start: str) -> None:
        self._state, self._start, self._head = "name", start, ""

    def _in_name(self, events: list[Event]) -> bool:
        before, mark = self._buffer.take_until((*self._middles, *self._starts, *self._ends))
        self._head += before
        if mark is None:
            return False
        # Mistral may put an id of its own behind the name.
        name = self._head.split("[CALL_ID]")[0].strip()
        if mark in self._middles and name in self._names:
            events.append(CallStart(name))
            self._state, self._held, self._has_arguments = "arguments", "", False
        else:
            events.append(Text(self._start + self._head + mark))
            self._state = "text"
        self._start = self._head = ""
        return True

    def _in_arguments(self, events: list[Event]) -> bool:
        """White space and fences around the JSON are not the JSON's."""
        before, mark = self._buffer.take_until(self._ends)
        text = self._held + before
        text = text if self._has_arguments else text.lstrip()
        shown = text.rstrip(_AROUND_JSON)
        self._held = text[len(shown) :]
        self._has_arguments = self._has_arguments or bool(shown)
        events.append(CallArguments(shown))
        if mark is None:
            return False
        if not self._has_arguments:
            events.append(CallArguments("{}"))
        self._state, self._held = "text", ""
        if mark in self._starts:
            self._begin(mark)
        return True
