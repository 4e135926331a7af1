"""Tiny models and checks for structured output."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
from tokenizers import Tokenizer
from twofold.engine.grammar.compiler import GrammarCompiler
from twofold.engine.grammar.constraint import Constraint
from twofold.engine.grammar.vocabulary import Vocabulary, last_token
from twofold.engine.sampling_params import SamplingParams
from twofold.engine.structured_output import StructuredOutput


def vocabulary_of(folder: Path) -> Vocabulary:
    """The tokens of a checkpoint."""
    pipeline = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return Vocabulary(lambda: pipeline, last_token(pipeline) + 1)


class Acceptor:
    """Says which texts a form takes, token by token through the engine's own constraint."""

    def __init__(self, vocabulary: Vocabulary, eos: int) -> None:
        self._vocabulary = vocabulary
        self._compiler = GrammarCompiler(vocabulary, vocabulary.size, frozenset({eos}))

    def constraint(self, **options: Any) -> Constraint:
        """A constraint for SamplingParams with these options."""
        future = self._compiler.start(SamplingParams(**options))
        assert future is not None
        return future.result()[0]

    def accepts(self, form: StructuredOutput, raw: bytes) -> bool:
        """True where ``raw`` (ids 0..255 are bytes) follows the form and may end there."""
        constraint = self.constraint(structured=form)
        for byte in raw:
            constraint.advance(byte)
            if constraint.error is not None:
                return False
        return constraint.is_complete or bool(constraint._matcher.is_accepting())


def random_schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    """A small schema of the kinds that people write, with an instance of at most some hundred bytes."""
    kinds: list[Callable[[], dict[str, Any]]] = [
        lambda: {"type": "integer", "minimum": rng.randint(-5, 0), "maximum": rng.randint(1, 999)},
        lambda: {"type": "boolean"},
        lambda: {"type": "null"},
        lambda: {"type": "string", "maxLength": rng.randint(0, 6)},
        lambda: {
            "type": "string",
            "pattern": rng.choice(["^[a-z]{2,4}$", "^(ab|c)+[0-9]{1,2}$", "^x?y*z$"]),
            "maxLength": 9,
        },
        lambda: {"enum": rng.sample(["red", "blue", "晴天", 'a"b', 3, None, True], 3)},
        lambda: {"type": "string", "format": rng.choice(["date", "time", "uuid", "ipv4"])},
        lambda: {"const": rng.choice(["one", 2, [1, "x"], {"k": False}])},
    ]
    nested: list[Callable[[], dict[str, Any]]] = [
        lambda: _random_object(rng, depth),
        lambda: {"type": "array", "items": random_schema(rng, depth - 1), "minItems": rng.randint(0, 1), "maxItems": 2},
        lambda: {"anyOf": [random_schema(rng, depth - 1), {"type": "boolean"}]},
    ]
    return rng.choice(kinds + nested * 2 if depth else kinds)()


def _random_object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(["a", "b", "état", "long name", 'q"uote'], rng.randint(1, 3))
    return {
        "type": "object",
        "properties": {name: random_schema(rng, depth - 1) for name in names},
        "required": rng.sample(names, rng.randint(0, len(names))),
        "additionalProperties": False,
    }


def check_valid(text: str, schema: dict[str, Any]) -> None:
    """``text`` is JSON that follows ``schema``, judged by the jsonschema package."""
    jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker()).validate(json.loads(text))
