"""From a StructuredOutput to the text of a grammar that llguidance reads, and the check that it can be built."""

from __future__ import annotations

import functools
import importlib
import json
from collections.abc import Mapping
from typing import Any

from ...errors import UnsupportedError
from ..structured_output import StructuredOutput
from .schema_rewrite import rewritten
from .structural_tags import tag_grammar

# A run of white space between JSON's tokens is bounded, so that a model cannot fill its output with it.
MAX_WHITESPACE = 20
JSON_OPTIONS: dict[str, Any] = {
    "whitespace_pattern": rf"[ \t\n\r]{{1,{MAX_WHITESPACE}}}",
    "json_allow_general_unicode_escapes": True,
    "lenient": False,
    "coerce_one_of": False,
}
_MAX_MESSAGE = 400


def llguidance() -> Any:
    """The library; UnsupportedError where it is not installed."""
    try:
        return importlib.import_module("llguidance")
    except ImportError:
        raise UnsupportedError(
            "structured output needs the package llguidance, which is not installed: pip install llguidance"
        ) from None


@functools.cache
def parser_limits() -> Any:
    """What a grammar may cost: while it is built, for one token, and in memory. Work stops at a limit with an error."""
    return llguidance().LLParserLimits(
        max_items_in_row=2000,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_lexer_states=50_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


def grammar_text(structured: StructuredOutput, special_tokens: Mapping[str, int]) -> str:
    """The grammar as llguidance reads it; ``special_tokens`` maps the texts that are tokens of their own to their ids.

    RequestError for a structural tag of an unknown shape and for GBNF that cannot be read.
    """
    library = llguidance()
    kind = structured.kind
    if kind == "json" or kind == "json_object":
        schema = structured.text() if kind == "json" else '{"type": "object"}'
        return library.LLMatcher.grammar_from_json_schema(with_options(json.loads(schema)))
    if kind == "regex":
        return library.LLMatcher.grammar_from_regex(structured.text())
    if kind == "choice":
        return library.LLMatcher.grammar_from_lark("start: " + " | ".join(map(quoted, structured.choice or ())))
    if kind == "structural_tag":
        tag = json.loads(structured.text())
        return library.LLMatcher.grammar_from_lark(tag_grammar(tag, special_tokens, structured.error))
    try:
        return library.grammar_from("grammar", structured.text())
    except ValueError as error:
        raise structured.error(f"{structured.param}: the grammar cannot be read: {error}") from None


def with_options(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A schema under our options; any of its own are dropped, for they could make the grammar laxer than the schema."""
    made = rewritten(schema)
    # A schema that nothing fulfils is a boolean, which takes no options; llguidance refuses this one as it does that.
    return {**(made if isinstance(made, Mapping) else {"allOf": [made]}), "x-guidance": JSON_OPTIONS}


def quoted(text: str) -> str:
    """A text as Lark writes it."""
    return json.dumps(text, ensure_ascii=False)


@functools.lru_cache(maxsize=256)
def check_structured(structured: StructuredOutput) -> None:
    """Build the grammar once without a vocabulary; RequestError where that fails or costs too much.

    Takes up to about half a second for the largest grammars that the limits let through, most of it without
    Python's lock.
    """
    text = grammar_text(structured, {})
    failed, messages = llguidance().LLMatcher.validate_grammar_with_warnings(text, None, limits=parser_limits())
    if failed:
        raise cannot_build(structured, messages[0] if messages else "unknown reason")


def cannot_build(structured: StructuredOutput, reason: str) -> Exception:
    """The error for a grammar that llguidance refuses."""
    first = " ".join(reason.split())[:_MAX_MESSAGE]
    return structured.error(
        f"{structured.param}: no grammar can be made of this {structured.kind.replace('_', ' ')}: {first}"
    )
