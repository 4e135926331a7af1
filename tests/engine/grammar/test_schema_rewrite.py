"""Keywords that are rewritten: what a grammar takes, beside what jsonschema says of the client's own schema."""

from __future__ import annotations

import itertools
import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structured_models import Acceptor
from twofold.engine.grammar.grammar_text import check_structured
from twofold.engine.grammar.schema_rewrite import rewritten
from twofold.engine.structured_output import StructuredOutput
from twofold.errors import RequestError

VALUES: list[Any] = [None, True, 1, 2.5, "x", [], [1]]
OBJECTS: list[Any] = [
    dict(zip(names, values, strict=True))
    for count in range(4)
    for names in itertools.combinations("abc", count)
    for values in itertools.product((1, "x"), repeat=count)
]
LISTS: list[Any] = [list(order) for count in range(4) for order in itertools.product((1, 2, "x"), repeat=count)]
ABC = {"type": "object", "properties": {"a": {}, "b": {}, "c": {}}, "additionalProperties": False}
A_INTEGER = {"properties": {"a": {"type": "integer"}}}


def verdicts(acceptor: Acceptor, schema: Any, instances: list[Any]) -> tuple[list[Any], list[Any]]:
    """What is taken though wrong, and what is right but not taken."""
    # The newer drafts have split ``dependencies`` in two.
    draft = jsonschema.Draft7Validator if "dependencies" in json.dumps(schema) else jsonschema.Draft201909Validator
    judge, form = draft(schema), StructuredOutput(json=schema)
    check_structured(form)
    taken = [item for item in instances if acceptor.accepts(form, json.dumps(item).encode())]
    wrong = [item for item in taken if not judge.is_valid(item)]
    return wrong, [item for item in instances if item not in taken and judge.is_valid(item)]


@pytest.mark.parametrize(
    "schema",
    [
        {"not": {"type": "string"}},
        {"not": {"type": ["number", "object"]}},
        {"type": ["string", "null"], "not": {"type": "null"}},
        {"enum": [1, "x", None], "not": {"const": "x"}},
        {"enum": [1, "x", None], "not": {"enum": ["x", 1.0]}},
        {"not": False},
        {**ABC, "not": {"required": ["a"]}},
        {**ABC, "properties": {"a": {"not": {}}, "b": {}, "c": {}}},
        {**ABC, "dependencies": {"b": ["a"]}},
        {**ABC, "dependentRequired": {"b": ["a"], "c": ["a", "b"]}},
        {**ABC, "dependentSchemas": {"b": A_INTEGER}},
        {**ABC, "dependencies": {"b": A_INTEGER, "c": ["b"]}},
        {"dependencies": {"b": ["a"]}},
        {"anyOf": [{**ABC, "dependentRequired": {"b": ["a"]}}, {"not": {"type": "object"}}]},
        {"type": "array", "uniqueItems": False},
        {"type": "array", "uniqueItems": True, "maxItems": 1},
        {"type": "array", "uniqueItems": True, "items": {"enum": [1, 2, "x"]}},
        {"type": "array", "uniqueItems": True, "items": {"type": "integer", "enum": [1, 1.0, 2]}, "minItems": 1},
        {"type": "array", "uniqueItems": True, "items": {"enum": ["x", 2, 1]}, "minItems": 2, "maxItems": 2},
    ],
    ids=json.dumps,
)
def test_the_same_instances(acceptor: Acceptor, schema: dict[str, Any]) -> None:
    assert verdicts(acceptor, schema, VALUES + OBJECTS + LISTS) == ([], [])


def test_numbers_that_are_no_integers_are_left_out(acceptor: Acceptor) -> None:
    assert verdicts(acceptor, {"not": {"type": "integer"}}, VALUES) == ([], [2.5])


@pytest.mark.parametrize(
    "schema",
    [
        {"not": {"type": "object", "properties": {"a": {}}}},
        {"type": "integer", "not": {"type": "number"}},
        {"type": "string", "not": {"pattern": "x"}},
        {"not": {}},
        {"oneOf": [{"not": {"type": "integer"}}, {"type": "number"}]},
        {"type": "array", "uniqueItems": True},
        {"type": "array", "uniqueItems": True, "items": {"enum": [1, 2, 3, 4, 5]}},
        {"uniqueItems": True, "items": {"enum": [1, 2]}},
        {"dependencies": {name: ["z"] for name in "abcdefg"}},
        {"dependencies": {"a": "b"}},
        {
            "properties": {
                f"k{i}": {"type": "array", "uniqueItems": True, "items": {"enum": [1, 2, 3, 4]}} for i in range(99)
            }
        },
        {"$ref": "#/definitions/x", "definitions": {"x": {}}, "not": {"type": "null"}},
    ],
    ids=json.dumps,
)
def test_others_are_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="no grammar"):
        check_structured(StructuredOutput(json=schema))


def test_deep_schemas() -> None:
    schema: Any = {"not": {"type": "null"}}
    for _ in range(600):
        schema = {"properties": {"a": schema}}
    assert rewritten(schema) == schema, "too deep to be rewritten, and so left as it is"
    with pytest.raises(RequestError):
        check_structured(StructuredOutput(json=schema))


def test_words_that_are_no_keywords_stay() -> None:
    schema = {"properties": {"not": {"const": {"not": {}}}, "dependencies": {"default": {"uniqueItems": False}}}}
    assert rewritten(schema) == schema


_leaves = st.sampled_from(
    [
        {},
        {"type": "integer"},
        {"type": ["string", "null"]},
        {"not": {"type": "string"}},
        {"not": {"type": "integer"}},
        {"enum": [1, "x"], "not": {"const": 1}},
        {"not": {"required": ["b"]}},
        {"dependentRequired": {"b": ["a"]}},
        {"dependentSchemas": {"a": {"properties": {"b": {"not": {"type": "string"}}}}}},
        {"type": "array", "uniqueItems": True, "items": {"enum": [1, 2]}},
    ]
)
_schemas = st.recursive(
    _leaves,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=2).map(lambda parts: {"anyOf": parts}),
        st.lists(inner, min_size=1, max_size=2).map(lambda parts: {"allOf": parts}),
        st.lists(inner, min_size=2, max_size=2).map(lambda parts: {"oneOf": parts}),
        st.dictionaries(st.sampled_from("ab"), inner, min_size=1).map(lambda parts: {"properties": parts}),
    ),
    max_leaves=4,
)


@settings(max_examples=60, deadline=None)
@given(schema=_schemas)
def test_nothing_wrong_is_taken(acceptor: Acceptor, schema: dict[str, Any]) -> None:
    try:
        wrong, _ = verdicts(acceptor, schema, VALUES + OBJECTS + LISTS[:10])
    except RequestError:
        return
    assert not wrong
