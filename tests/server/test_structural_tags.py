"""Structural tags and calls written as tags: by a random model, so that only the grammar can have made them right."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from http_server import RunningServer, running_server
from structured_models import Acceptor, vocabulary_of
from twofold.server.tools.formats import FORMATS
from twofold.server.tools.grammar import tool_grammar
from twofold.server.tools.request import Tool, ToolUse

CITY = {
    "type": "object",
    "properties": {
        "kind": {"type": "string", "enum": ["town", "<city>"]},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
        "old": {"type": "boolean"},
    },
    "required": ["kind", "size"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "city", "parameters": CITY, "strict": True}}]
NUMBER = {"type": "object", "properties": {"n": {"enum": [1, 2, 3]}}, "required": ["n"], "additionalProperties": False}
TAG = {
    "type": "structural_tag",
    "format": {
        "type": "sequence",
        "elements": [
            {"type": "regex", "pattern": "[ab]{3}"},
            {
                "type": "tag",
                "begin": "<n>",
                "content": {"type": "json_schema", "json_schema": NUMBER},
                "end": "</n>",
            },
        ],
    },
}


@pytest.fixture(scope="module")
def random(tiny_model: Callable[..., Path]) -> Iterator[RunningServer]:
    options = {"tool_parser": "qwen3_coder"}
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{% if tools %}.{% endif %}"
    with running_server(tiny_model("llama"), server=options, num_threads=1, chat_template=template) as server:
        yield server


def ask(server: RunningServer, **options: Any) -> Any:
    messages = [{"role": "user", "content": "x"}]
    fields: dict[str, Any] = {"max_tokens": 250, "seed": 5, **options}
    return server.openai.chat.completions.create(model=server.model, messages=messages, **fields)


def joined(server: RunningServer, **options: Any) -> tuple[str, list[list[str]], str]:
    """(text, [name, arguments] of each call, finish_reason) of a stream."""
    text, calls, reason = "", [], ""
    for chunk in ask(server, stream=True, **options):
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reason = choice.finish_reason or reason
            for part in choice.delta.tool_calls or []:
                if part.function.name:
                    calls.append([part.function.name, ""])
                calls[part.index][1] += part.function.arguments or ""
    return text, calls, reason


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "city"}}])
def test_forced_calls(random: RunningServer, choice: Any) -> None:
    answer = ask(random, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False, n=3)
    for item in answer.choices:
        assert item.finish_reason == "tool_calls" and not item.message.content
        (call,) = item.message.tool_calls
        assert call.function.name == "city"
        jsonschema.validate(json.loads(call.function.arguments), CITY)


def test_a_forced_call_that_is_cut(random: RunningServer) -> None:
    item = ask(random, tools=TOOLS, tool_choice="required", max_tokens=60).choices[0]
    assert item.finish_reason == "length"
    _, calls, reason = joined(random, tools=TOOLS, tool_choice="required", max_tokens=60)
    assert reason == "length" and calls == [[c.function.name, c.function.arguments] for c in item.message.tool_calls]


def _call(name: str, size: str) -> str:
    return (
        f"<tool_call>\n<function=town>\n<parameter=name>\n{name}\n</parameter>\n<parameter=size>\n{size}\n</parameter>\n"
        "</function>\n</tool_call>"
    )


def test_the_grammar_of_texts(tiny_model: Callable[..., Path]) -> None:
    """Texts are free but for the mark that ends them; other values follow their schemas."""
    schema = {"type": "object", "properties": {"name": {"type": "string"}, "size": {"type": "integer"}}}
    use = ToolUse((Tool("town", {**schema, "required": ["name", "size"]}, True),), forced=True, parallel=False)
    form = tool_grammar(use, FORMATS["qwen3_coder"], None)
    assert form is not None
    acceptor = Acceptor(vocabulary_of(tiny_model("llama")), 256)
    for name in ("Oslo", "", "a < b </div>\n\n</p> <<x", "é\n", "</parameter ", "<parameter=x>"):
        assert acceptor.accepts(form, _call(name, "7").encode()), name
    for name, size in (("Oslo", "x"), ("Oslo", ""), ("a</parameter>b", "7"), ("Oslo", "1.5")):
        assert not acceptor.accepts(form, _call(name, size).encode()), (name, size)
    two = _call("a", "1") + "\n" + _call("b", "2")
    assert not acceptor.accepts(form, two.encode()), "one call only"


def test_a_forced_call_as_a_stream(random: RunningServer) -> None:
    options = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    item = ask(random, **options).choices[0]
    text, calls, reason = joined(random, **options)
    assert reason == item.finish_reason and text == (item.message.content or "")
    assert calls == [[call.function.name, call.function.arguments] for call in item.message.tool_calls or []]


def test_a_tag_beside_tools(random: RunningServer) -> None:
    """The tag is the form of the answer; tools that are not forced do not loosen it."""
    for tools in ({}, {"tools": TOOLS, "tool_choice": "auto"}):
        item = ask(random, response_format=TAG, **tools).choices[0]
        assert item.finish_reason == "stop" and not item.message.tool_calls
        found = re.fullmatch(r"[ab]{3}<n>(.*)</n>", item.message.content, re.DOTALL)
        assert found is not None
        jsonschema.validate(json.loads(found[1]), NUMBER)
        assert joined(random, response_format=TAG, **tools) == (item.message.content, [], "stop")


def test_tags_that_are_none(random: RunningServer) -> None:
    for given in ({"type": "structural_tag"}, {"type": "structural_tag", "format": {"type": "circle"}}):
        body = {"model": random.model, "messages": [{"role": "user", "content": "x"}], "response_format": given}
        response = random.post("/v1/chat/completions", body)
        assert response.status_code == 400 and response.json()["error"]["param"] == "response_format"
