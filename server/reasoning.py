"""Thoughts between ``<think>`` and ``</think>``: told apart from the answer as the text comes."""

from __future__ import annotations

from .tools.events import Event, Text, Thought
from .tools.scanning import Buffer

THINK, THINK_END = "<think>", "</think>"


class ThinkParser:
    """``opened``: the prompt has begun the thoughts. ``closed``: it has ended them, and only an answer follows."""

    def __init__(self, *, opened: bool = False, closed: bool = False) -> None:
        self._buffer = Buffer()
        self._strip = False
        self._state = "answer" if closed else "thoughts" if opened else "start"

    def push(self, text: str) -> list[Event]:
        """Events that ``text`` makes certain."""
        self._buffer.text += text
        events: list[Event] = []
        if self._state == "start":
            self._begin()
        if self._state == "thoughts":
            before, mark = self._buffer.take_until((THINK_END,))
            events.append(Thought(before))
            if mark is not None:
                self._state, self._strip = "answer", True
        if self._state == "answer":
            events.append(Text(self._answer()))
        return events

    def finish(self) -> list[Event]:
        """What waited."""
        rest = self._buffer.take_all()
        return [Thought(rest) if self._state == "thoughts" else Text(rest)]

    def _answer(self) -> str:
        """All that has come, without the line breaks between thoughts and answer."""
        text = self._buffer.take_all()
        if self._strip:
            text = text.lstrip()
            self._strip = not text
        return text

    def _begin(self) -> None:
        text = self._buffer.text.lstrip()
        if text.startswith(THINK):
            self._buffer.text = text[len(THINK) :]
            self._state = "thoughts"
        elif not THINK.startswith(text):
            self._state = "answer"


def prompt_state(prompt: str) -> tuple[bool, bool]:
    """(opened, closed) of a rendered prompt: whether it ends with the beginning of thoughts, or with their end."""
    text = prompt.rstrip()
    return text.endswith(THINK), text.endswith(THINK_END)
