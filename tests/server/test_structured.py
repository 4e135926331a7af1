"""Structured output over HTTP: every field that asks for it, streams, refusals, and that refusing costs nobody."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from http_server import RunningServer
from structured_models import check_valid

SCHEMA = {
    "type": "object",
    "properties": {"c": {"enum": ["red", "blue"]}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["c", "n"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
TAGS = {"structures": [{"begin": "<n>", "schema": {"type": "integer"}, "end": "</n>"}], "triggers": ["<n>"]}


def refused(server: RunningServer, path: str = "/v1/completions", **fields: object) -> dict:
    """The error of a request that must be a 400, streamed or not."""
    prompt = {"prompt": "x"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
    errors = []
    for stream in (False, True):
        response = server.post(path, {"model": server.model, "stream": stream, **prompt, **fields})
        assert response.status_code == 400, response.text
        errors.append(response.json()["error"])
    assert errors[0] == errors[1]
    return errors[0]


def test_official_client(tiny: RunningServer) -> None:
    messages = [{"role": "user", "content": "hi"}]
    options = {
        "model": tiny.model,
        "messages": messages,
        "response_format": FORMAT,
        "max_tokens": 200,
        "seed": 4,
        "n": 3,
    }
    answer = tiny.openai.chat.completions.create(**options)
    texts = [choice.message.content for choice in answer.choices]
    assert [choice.finish_reason for choice in answer.choices] == ["stop"] * 3
    for text in texts:
        check_valid(text or "", SCHEMA)
    streamed = ["", "", ""]
    for chunk in tiny.openai.chat.completions.create(**options, stream=True, logprobs=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"response_format": FORMAT}, None),
        ({"response_format": {"type": "json_object"}, "logit_bias": {"125": 50}}, r"\{\}"),
        ({"structured_outputs": {"json": SCHEMA}}, None),
        ({"structured_outputs": {"regex": "[ab]{3}"}}, "[ab]{3}"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"structured_outputs": {"grammar": 'start: "a" "b"'}}, "ab"),
        (
            {"structured_outputs": {"structural_tag": TAGS}, "logit_bias": {"60": 100, "256": -100}, "max_tokens": 6},
            ".*<.*",
        ),
        ({"guided_json": json.dumps(SCHEMA)}, None),
        ({"guided_regex": "[ab]{3}"}, "[ab]{3}"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"guided_grammar": 'root ::= "ab"'}, "ab"),
        ({"json_schema": json.dumps(SCHEMA)}, None),
        ({"regex": "[ab]{3}"}, "[ab]{3}"),
        ({"ebnf": 'root ::= "ab"'}, "ab"),
        ({"grammar": 'root ::= "ab"'}, "ab"),
    ],
)
def test_fields(tiny: RunningServer, fields: dict, pattern: str | None) -> None:
    import re

    for path, prompt in (("complete", "x"), ("chat", "x")):
        answer = getattr(tiny, path)(prompt, **{"max_tokens": 200, "seed": 1, **fields})
        choice = answer["choices"][0]
        text = choice["text"] if path == "complete" else choice["message"]["content"]
        if pattern is None:
            check_valid(text, SCHEMA)
        else:
            assert re.fullmatch(pattern, text, re.DOTALL), text


def test_scripted_model_is_bent(chain: RunningServer) -> None:
    """The script says abcd; the form allows what it can of it and no more."""
    answer = chain.complete("e", structured_outputs={"regex": "ab[xy]"}, max_tokens=10)
    assert answer["choices"][0]["text"] in ("abx", "aby") and answer["choices"][0]["finish_reason"] == "stop"
    free = chain.complete("e", response_format={"type": "text"}, max_tokens=10)
    assert free["choices"][0]["text"] == "abcd"


# A small schema with 10 ** 8 combinations.
COSTLY = {
    "allOf": [
        {"anyOf": [{"properties": {f"k{i}": {"const": j}}, "required": [f"k{i}"]} for j in range(10)]} for i in range(8)
    ]
}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
        ),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": "json"}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"if": {}}}}},
            "response_format",
        ),
        ({"response_format": {"type": "json_object"}, "regex": "a"}, "regex"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"xml": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"json": False}}, "structured_outputs"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_regex": r"(a)\1"}, "guided_regex"),
        ({"grammar": "start: undefined_rule"}, "grammar"),
        ({"json_schema": "{"}, "json_schema"),
        ({"regex": 5}, "regex"),
        ({"json_schema": json.dumps(COSTLY)}, "json_schema"),
    ],
)
def test_b073_refusals(tiny: RunningServer, fields: dict, param: str) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        error = refused(tiny, path, **fields)
        assert error["param"] == param and error["type"] == "invalid_request_error"
    tiny.wait_idle()


def test_b080_costly_grammars_hold_up_nobody(tiny: RunningServer) -> None:
    """Ten of them at once: each is refused or answered within its limits, and other requests keep their pace."""
    levels = {"l4": {"type": "string", "pattern": "^(a{1,1000}){1,1000}$"}}
    for level in range(3, -1, -1):
        links = [{"$ref": f"#/$defs/l{level + 1}"}] * 60
        levels[f"l{level}"] = {
            "anyOf": [
                {"type": "object", "properties": {f"k{i}": link}, "required": [f"k{i}"], "additionalProperties": False}
                for i, link in enumerate(links)
            ]
        }
    costly = [
        {"json_schema": json.dumps({"$ref": "#/$defs/l0", "$defs": levels, "title": str(index)}), "max_tokens": 4}
        for index in range(6)
    ]
    costly += [{"regex": "(a{1,1000}){1,1000}" + "b" * index, "max_tokens": 4} for index in range(4)]

    def ask(fields: dict) -> int:
        body = {"model": tiny.model, "prompt": "x", **fields}
        return httpx.post(f"{tiny.url}/v1/completions", json=body, timeout=200).status_code

    with ThreadPoolExecutor(len(costly)) as threads:
        asked = [threads.submit(ask, fields) for fields in costly]
        num_probes = 0
        while not all(future.done() for future in asked):
            assert tiny.http.get("/health").status_code == 200
            num_probes += 1
            time.sleep(0.02)
        # One that waits for them all would be the only one.
        assert num_probes > 3
        assert {future.result() for future in asked} <= {200, 400}
    tiny.complete("x", max_tokens=2)
    tiny.wait_idle()
