"""What a model's text turns into: thoughts, text for the user, and calls of tools, in the order in which they come."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Text:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    """Text of the model's thoughts."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call of the tool ``name`` begins; its arguments follow."""

    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the JSON text of the last call's arguments."""

    text: str


Event = Text | Thought | CallStart | CallArguments


class Parser(Protocol):
    """Reads a model's text as it comes. How the text is cut into pieces changes how events are cut, nothing else."""

    def push(self, text: str) -> list[Event]: ...

    def finish(self) -> list[Event]: ...


def merged(events: Iterable[Event]) -> list[Event]:
    """The same events, neighbours of one kind joined and empty ones left out."""
    result: list[Event] = []
    for event in events:
        if isinstance(event, CallStart):
            result.append(event)
        elif event.text and result and type(result[-1]) is type(event):
            last = result[-1]
            assert not isinstance(last, CallStart)
            result[-1] = type(event)(last.text + event.text)
        elif event.text:
            result.append(event)
    return result
