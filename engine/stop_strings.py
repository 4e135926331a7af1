"""Stop strings in a stream of text."""

from __future__ import annotations

from collections.abc import Sequence


class StopChecker:
    """Finds the first stop string in text that arrives in pieces, and holds back what may become one.

    The result does not depend on how the text is cut into pieces: the stop string that is complete first wins, and of
    several that end at the same character the longest (which began first). Each stop string is followed with its own
    Knuth-Morris-Pratt automaton, whose state is also the number of characters that must wait.
    """

    def __init__(self, stop: Sequence[str], *, include: bool = False) -> None:
        self._automata = [_Automaton(text) for text in sorted(set(stop), key=len, reverse=True)]
        self._include = include
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str, *, can_stop: bool = True) -> str:
        """The text that is now certain to belong to the output.

        Afterwards ``matched`` tells which stop string ended it, if one did; it is in the returned text only with
        ``include``. A stop string completed while ``can_stop`` is False ends nothing.
        """
        for position, char in enumerate(text):
            complete = self._advance(char)
            if complete is not None and can_stop:
                self.matched = complete
                shown = self._held + text[: position + 1]
                self._held = ""
                return shown if self._include else shown[: -len(complete)]
        pending = self._held + text
        waiting = 0 if self._include else max((automaton.state for automaton in self._automata), default=0)
        self._held = pending[len(pending) - waiting :]
        return pending[: len(pending) - waiting]

    def flush(self) -> str:
        """The held-back text at the end of the output, where no stop string matched."""
        held, self._held = self._held, ""
        return held

    def _advance(self, char: str) -> str | None:
        complete: str | None = None
        for automaton in self._automata:
            if automaton.advance(char) and complete is None:
                complete = automaton.text
        return complete


class _Automaton:
    """Follows one string: ``state`` is the length of its longest proper prefix that ends the text seen so far."""

    __slots__ = ("_fallback", "state", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.state = 0
        self._fallback = _fallbacks(text)

    def advance(self, char: str) -> bool:
        """Read one character; True where it completes the string."""
        state = self.state
        while state and self.text[state] != char:
            state = self._fallback[state - 1]
        if self.text[state] == char:
            state += 1
        complete = state == len(self.text)
        self.state = self._fallback[state - 1] if complete else state
        return complete


def _fallbacks(text: str) -> list[int]:
    """For each prefix, the length of its longest proper prefix that is also its suffix."""
    table = [0] * len(text)
    length = 0
    for i in range(1, len(text)):
        while length and text[i] != text[length]:
            length = table[length - 1]
        if text[i] == text[length]:
            length += 1
        table[i] = length
    return table
