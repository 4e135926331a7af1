"""StructuredOutput: what form a request's output must have. Plain data; `engine/grammar` turns it into a grammar."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import RequestError

KINDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
# Longer texts are refused before anything looks at them: their cost grows with their length.
MAX_GRAMMAR_CHARS = 256 << 10
MAX_CHOICES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutput:
    """One of six forms; exactly one is given. The output ends where the form is complete.

    ``json``            a JSON schema, as a dict or as text; kept as text.
    ``json_object``     True: any JSON object.
    ``regex``           a regular expression that the whole output matches.
    ``choice``          texts, one of which the output is.
    ``grammar``         a grammar in Lark's notation, or in GBNF.
    ``structural_tag``  free text in which certain beginnings start a part that follows a schema, as a dict or as text.
    ``param``           what errors call the field that the client wrote.
    """

    json: str | dict[str, Any] | bool | None = None
    json_object: bool = False
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    structural_tag: str | dict[str, Any] | None = None
    param: str = field(default="structured", compare=False)

    def __post_init__(self) -> None:
        given = [name for name in KINDS if getattr(self, name) not in (None, False) or self._is_false_schema(name)]
        if len(given) != 1:
            raise self.error(
                f"{self.param} gives {' and '.join(given) or 'no form'}; give exactly one of {', '.join(KINDS)}"
            )
        if self.choice is not None:
            self._check_choice(self.choice)
        for name in ("json", "structural_tag"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, self._as_text(name, value))
        for name in ("regex", "grammar"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise self.error(f"{self.param}: {name} is {reprlib.repr(value)}; it must be a text")
        if not isinstance(self.json_object, bool):
            raise self.error(f"{self.param}: json_object is {reprlib.repr(self.json_object)}; it must be True or False")
        size = len(self.text())
        if size > MAX_GRAMMAR_CHARS:
            raise self.error(f"{self.param} has {size} characters; the limit is {MAX_GRAMMAR_CHARS}: make it smaller")

    @property
    def kind(self) -> str:
        """Which of ``KINDS`` is given."""
        return next(name for name in KINDS if getattr(self, name) not in (None, False))

    def text(self) -> str:
        """The form as text, whichever it is."""
        value = getattr(self, self.kind)
        return value if isinstance(value, str) else json.dumps(value)

    def error(self, message: str) -> RequestError:
        """A RequestError about this form, under the name that the client knows."""
        return RequestError(message, param=self.param)

    def _is_false_schema(self, name: str) -> bool:
        return name == "json" and self.json is False

    def _check_choice(self, choice: Any) -> None:
        if isinstance(choice, str) or not isinstance(choice, Sequence) or not all(isinstance(c, str) for c in choice):
            raise self.error(f"{self.param}: choice is {reprlib.repr(choice)}; it must be a list of texts")
        if not choice or not all(choice) or len(choice) > MAX_CHOICES:
            raise self.error(
                f"{self.param}: choice has {len(choice)} texts; give 1 to {MAX_CHOICES}, none of them empty"
            )
        object.__setattr__(self, "choice", tuple(choice))

    def _as_text(self, name: str, value: Any) -> str:
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError) as error:
                raise self.error(f"{self.param}: {name} is no JSON: {error}") from None
        if name == "json" and isinstance(value, bool):
            value = {} if value else {"not": {}}
        if not isinstance(value, Mapping):
            raise self.error(f"{self.param}: {name} is {reprlib.repr(value)}; it must be an object")
        try:
            # Without ASCII escapes: however the client spelled a character, it is the same grammar.
            return json.dumps(value, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise self.error(f"{self.param}: {name} cannot be written as JSON: {error}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningSpan:
    """Where a model thinks before it answers, and how long it may.

    ``start`` and ``end``  texts around the thoughts. ``opened``: the prompt has begun them already.
    ``budget``             tokens of thought at most, then ``closing`` (``end`` unless given) is forced; None: no limit.
    ``closed``             the prompt has ended them: the answer begins at once.

    A `StructuredOutput` of the same request holds for what follows the thoughts.
    """

    start: str
    end: str
    opened: bool = False
    closed: bool = False
    budget: int | None = None
    closing: str | None = None

    def __post_init__(self) -> None:
        if not self.start or not self.end:
            raise RequestError("reasoning needs a start and an end, neither of them empty", param="reasoning")
        if self.budget is not None and (isinstance(self.budget, bool) or self.budget < 0):
            raise RequestError(f"the reasoning budget is {self.budget}; it must be at least 0", param="reasoning")
