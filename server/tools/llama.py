"""Llama 3's calls: the whole answer is JSON, with ``<|python_tag|>`` before it or without."""

from __future__ import annotations

from collections.abc import Collection

from .events import Event
from .marked import MarkedJsonParser

PYTHON_TAG = "<|python_tag|>"


class LlamaParser:
    """Drops the tag and reads calls at the beginning of the answer."""

    def __init__(self, names: Collection[str]) -> None:
        self._calls = MarkedJsonParser(names, ())
        self._head = ""
        self._begun = False

    def push(self, text: str) -> list[Event]:
        """Events that ``text`` makes certain."""
        if self._begun:
            return self._calls.push(text)
        self._head += text
        seen = self._head.lstrip()
        if PYTHON_TAG.startswith(seen) and seen != PYTHON_TAG:
            return []
        self._begun = True
        return self._calls.push(seen[len(PYTHON_TAG) :] if seen.startswith(PYTHON_TAG) else self._head)

    def finish(self) -> list[Event]:
        """What waited."""
        waiting = [] if self._begun else self._calls.push(self._head)
        return [*waiting, *self._calls.finish()]
