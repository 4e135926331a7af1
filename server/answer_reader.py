"""AnswerReader: one choice's text, told apart into thoughts, text and calls of tools."""

from __future__ import annotations

import json

from .tools.events import CallArguments, CallStart, Event, Parser, Text, Thought, merged


class AnswerReader:
    """Chains the parsers of thoughts and of calls. ``parallel`` False: only the first call counts.

    White space around thoughts, around calls, and between thoughts and text is the model's layout and is left out.
    """

    def __init__(self, thoughts: Parser | None, calls: Parser | None, *, parallel: bool = True) -> None:
        self._thoughts = thoughts
        self._calls = calls
        self._parallel = parallel
        self._arguments: list[str] = []
        self._dropping = False
        self._last: type[Event] | None = None
        self._space = ""

    @property
    def has_calls(self) -> bool:
        """True where at least one tool is called and the arguments of every call are whole."""
        return bool(self._arguments) and all(_is_json(arguments) for arguments in self._arguments)

    def push(self, text: str) -> list[Event]:
        """Events that ``text`` makes certain."""
        events: list[Event] = [Text(text)] if self._thoughts is None else self._thoughts.push(text)
        return self._shown(self._with_calls(events))

    def finish(self) -> list[Event]:
        """What waited for more text."""
        events = self._with_calls([] if self._thoughts is None else self._thoughts.finish())
        if self._calls is not None:
            events += self._calls.finish()
        shown = self._shown(events)
        # White space at the end of plain text is text.
        if self._space and self._last is Text and not self._arguments:
            shown.append(Text(self._space))
        return merged(shown)

    def _with_calls(self, events: list[Event]) -> list[Event]:
        if self._calls is None:
            return events
        result: list[Event] = []
        for event in events:
            result += self._calls.push(event.text) if isinstance(event, Text) else [event]
        return result

    def _shown(self, events: list[Event]) -> list[Event]:
        shown: list[Event] = []
        for event in events:
            if isinstance(event, CallStart):
                self._dropping = bool(self._arguments) and not self._parallel
                if not self._dropping:
                    self._arguments.append("")
                    shown.append(event)
                self._last, self._space = CallStart, ""
            elif isinstance(event, CallArguments):
                if not self._dropping:
                    self._arguments[-1] += event.text
                    shown.append(event)
            else:
                shown += self._trimmed(event)
        return merged(shown)

    def _trimmed(self, event: Text | Thought) -> list[Event]:
        kind = type(event)
        text = event.text
        if self._last is not kind:
            # The very first text keeps its beginning where nothing stood before it.
            if self._last is not None or kind is Thought:
                text = text.lstrip()
            if not text:
                return []
            self._space = ""
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        self._last = kind
        return [kind(shown)] if shown else []


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
