"""What a form takes and refuses, token by token."""

from __future__ import annotations

import json

import pytest
from structured_models import Acceptor
from twofold.engine.grammar.grammar_text import check_structured
from twofold.engine.structured_output import StructuredOutput
from twofold.errors import RequestError

CALL = {
    "begin": '<tool_call>{"name": "f", "arguments": ',
    "content": {
        "type": "json_schema",
        "json_schema": {
            "type": "object",
            "properties": {"x": {"type": "integer"}},
            "required": ["x"],
            "additionalProperties": False,
        },
    },
    "end": "}</tool_call>",
}


@pytest.mark.parametrize(
    ("raw", "taken"),
    [
        (b'"\x01"', False),
        (b'"\n"', False),
        (b'"\\q"', False),
        (b'"\\u12"', False),
        (b'"\\ud800"', False),
        (b'"\xff"', False),
        (b'"\xc0\x80"', False),
        (b'"\\u00e9"', True),
        ('"é"'.encode(), True),
        (b'"a b"', True),
        (b'"open', False),
    ],
)
def test_b077_strings(acceptor: Acceptor, raw: bytes, taken: bool) -> None:
    assert acceptor.accepts(StructuredOutput(json={"type": "string"}), raw) is taken
    if taken:
        json.loads(raw)


def test_white_space_is_bounded(acceptor: Acceptor) -> None:
    form = StructuredOutput(json={"type": "array", "items": {"type": "integer"}})
    assert acceptor.accepts(form, b"[" + b" " * 20 + b"1\n,\t2 ]")
    assert not acceptor.accepts(form, b"[" + b" " * 21 + b"1]")
    assert not acceptor.accepts(form, b" [1]") and not acceptor.accepts(form, b"[1] ")


@pytest.mark.parametrize(
    ("form", "taken", "refused"),
    [
        (StructuredOutput(regex="(a|b)+[0-9]{2}"), [b"ab12"], [b"ab1", b"12", b"xab12"]),
        (
            StructuredOutput(choice=("no", "no way", 'q"x', "晴")),
            [b"no", b"no way", b'q"x', "晴".encode()],
            [b"now", b"n"],
        ),
        (StructuredOutput(grammar='start: "a"+ "b"'), [b"aab"], [b"b", b"aa"]),
        (StructuredOutput(grammar='root ::= "a" | "b" root'), [b"bba"], [b"bb"]),
        (StructuredOutput(json_object=True), [b'{"a": [1, {}]}', b"{}"], [b"[]", b"1", b"{"]),
        (StructuredOutput(json=True), [b"1", b"[null]"], [b"nul"]),
    ],
)
def test_forms(acceptor: Acceptor, form: StructuredOutput, taken: list[bytes], refused: list[bytes]) -> None:
    assert all(acceptor.accepts(form, raw) for raw in taken)
    assert not any(acceptor.accepts(form, raw) for raw in refused)


def test_b076_spellings_are_one_grammar() -> None:
    raw, escaped = '{"enum": ["晴天", "😀"]}', '{"enum": ["\\u6674\\u5929", "\\ud83d\\ude00"]}'
    assert StructuredOutput(json=raw) == StructuredOutput(json=escaped)


def test_structural_tags(acceptor: Acceptor) -> None:
    call = b'<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
    legacy = {"begin": "<n>", "schema": {"type": "integer"}, "end": "</n>"}
    form = StructuredOutput(structural_tag={"structures": [legacy], "triggers": ["<n"]})
    assert acceptor.accepts(form, b"free <text> <n>12</n> more") and acceptor.accepts(form, b"no tag")
    assert not acceptor.accepts(form, b"<n>x") and not acceptor.accepts(form, b"<n>1")
    triggered = {"type": "triggered_tags", "triggers": ["<tool_call>"], "tags": [CALL]}
    form = StructuredOutput(structural_tag={"format": triggered})
    assert acceptor.accepts(form, b"hi " + call + b" and " + call + b" bye")
    assert not acceptor.accepts(form, b'<tool_call>{"name": "g"')
    separated = {"type": "tags_with_separator", "separator": "\n", "tags": [CALL], "at_least_one": True}
    form = StructuredOutput(structural_tag={"format": separated})
    assert acceptor.accepts(form, call + b"\n" + call) and not acceptor.accepts(form, b"text")
    form = StructuredOutput(structural_tag={"format": {**separated, "stop_after_first": True}})
    assert acceptor.accepts(form, call) and not acceptor.accepts(form, call + b"\n" + call)


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        ({"if": {"type": "string"}, "then": {"minLength": 2}}, "if"),
        ({"type": "object", "unevaluatedProperties": False}, "unevaluatedProperties"),
        ({"type": "array", "contains": {"type": "integer"}}, "contains"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}, "uniqueItems"),
        ({"oneOf": [{"minimum": 2}, {"type": "integer"}]}, "oneOf"),
        ({"type": "string", "pattern": r"\bab"}, "lookaround"),
        ({"type": "string", "pattern": "(?<=a)b"}, "look-around"),
        ({"type": "string", "pattern": r"(a)\1"}, "backreferences"),
        ({"$ref": "http://example.com/schema"}, "example.com"),
        ({"type": "strin"}, "strin"),
        (False, "false"),
        ({"not": {}}, "false"),
        ({"not": {"pattern": "x"}}, "not"),
    ],
)
def test_b073_what_cannot_be_enforced_is_refused(schema: dict | bool, word: str) -> None:
    with pytest.raises(RequestError, match=word) as caught:
        check_structured(StructuredOutput(json=schema, param="response_format"))
    assert caught.value.param == "response_format"


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"json": {}, "regex": "a"},
        {"json": "{"},
        {"json": "[1]"},
        {"json": {1, 2}},
        {"choice": []},
        {"choice": ["a", ""]},
        {"choice": "ab"},
        {"choice": ["x"] * 5000},
        {"regex": 5},
        {"regex": "a" * 300_000},
        {"structural_tag": "nope"},
    ],
)
def test_wrong_forms(options: dict) -> None:
    with pytest.raises(RequestError) as caught:
        StructuredOutput(**options)
    assert caught.value.param == "structured"


@pytest.mark.parametrize(
    "form",
    [
        StructuredOutput(regex="(?<=a)b"),
        StructuredOutput(grammar="start: x"),
        StructuredOutput(grammar="root ::= ((("),
        StructuredOutput(structural_tag={"format": {"type": "unknown"}}),
        StructuredOutput(structural_tag={"type": "structural_tag"}),
        StructuredOutput(structural_tag={"structures": [], "triggers": ["<"]}),
        StructuredOutput(structural_tag={"structures": [{"begin": "<a>", "schema": {}, "end": ""}], "triggers": ["x"]}),
    ],
)
def test_grammars_that_cannot_be_built(form: StructuredOutput) -> None:
    with pytest.raises(RequestError) as caught:
        check_structured(form)
    assert caught.value.param == "structured"
