"""Finding marks in text that comes in pieces."""

from __future__ import annotations

from collections.abc import Sequence


def find_first(text: str, marks: Sequence[str]) -> tuple[int, str] | None:
    """Where the first of ``marks`` begins, and which it is; of several at one place the longest."""
    found = [(place, -len(mark), mark) for mark in marks if (place := text.find(mark)) >= 0]
    if not found:
        return None
    place, _, mark = min(found)
    return place, mark


def num_held(text: str, marks: Sequence[str]) -> int:
    """Characters at the end of ``text`` that may be the beginning of a mark."""
    longest = min(len(text), max((len(mark) for mark in marks), default=1) - 1)
    for length in range(longest, 0, -1):
        tail = text[-length:]
        if any(mark.startswith(tail) for mark in marks):
            return length
    return 0


class Buffer:
    """Text that has come and has not been read."""

    def __init__(self) -> None:
        self.text = ""

    def take(self, count: int) -> str:
        """The next ``count`` characters."""
        taken, self.text = self.text[:count], self.text[count:]
        return taken

    def take_until(self, marks: Sequence[str]) -> tuple[str, str | None]:
        """Text before the first mark, and that mark, both taken; None where no mark is whole, a part of one waits."""
        found = find_first(self.text, marks)
        if found is None:
            return self.take(len(self.text) - num_held(self.text, marks)), None
        place, mark = found
        before = self.take(place)
        self.take(len(mark))
        return before, mark

    def take_all(self) -> str:
        """Everything."""
        return self.take(len(self.text))
