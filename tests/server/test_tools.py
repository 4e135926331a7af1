"""Calls of tools over HTTP, with the official client: choices, streams, grammars, and calls that are cut short."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from chain_model import build_chain_model
from http_server import RunningServer, running_server
from twofold.engine.chat_template import ChatTemplate

SCRIPTS: list[list[bytes | str]] = [
    [
        "A", "I", b" call.\n", b'<tool_call>\n{"name": "f", "arguments": {"x"', b": ", b"1", b"}}\n</tool_call>",
        b"\n<tool_call>", b'{"name": "g"', b', "arguments": {}}', b"</tool_call>",
    ],
    ["B", b'<tool_call>{"name": "h", "arguments": {"y": [', b"0", b","],
    ["C", "o", "k", "!"],
]  # fmt: skip
# It prints contents only, and shows by its words how its model calls.
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{% if tools %}{# <tool_call> #}{% endif %}"
F = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}, "c": {"enum": ["red", "blue"]}},
    "required": ["x", "c"],
    "additionalProperties": False,
}


def tool(name: str, parameters: dict | None = None, **more: Any) -> dict[str, Any]:
    function = {"name": name, "description": "does it", **more}
    return {"type": "function", "function": function if parameters is None else {**function, "parameters": parameters}}


TOOLS = [tool("f"), tool("g"), tool("h")]


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A scripted model that calls."""
    folder = tmp_path_factory.mktemp("caller")
    build_chain_model(folder, SCRIPTS, chat_template=TEMPLATE)
    with running_server(folder, num_threads=1) as server:
        yield server


@pytest.fixture(scope="module")
def random(tiny_model: Callable[..., Path]) -> Iterator[RunningServer]:
    """A random model whose template asks for calls as Hermes writes them."""
    with running_server(tiny_model("llama"), num_threads=1, chat_template=TEMPLATE) as server:
        yield server


def ask(server: RunningServer, content: str, **options: Any) -> Any:
    messages = [{"role": "user", "content": content}]
    return server.openai.chat.completions.create(
        **{"model": server.model, "messages": messages, "max_tokens": 60, **options}
    )


def streamed(server: RunningServer, content: str, **options: Any) -> tuple[str, list[dict[str, str]], str, list[Any]]:
    """Joined as clients join: content, calls by index, finish_reason, and all deltas."""
    text, calls, reason, deltas = "", [], "", []
    for chunk in ask(server, content, stream=True, **options):
        for choice in chunk.choices:
            deltas.append(choice.delta)
            text += choice.delta.content or ""
            reason = choice.finish_reason or reason
            for part in choice.delta.tool_calls or []:
                if part.index == len(calls):
                    calls.append({"id": part.id, "name": part.function.name, "arguments": ""})
                    assert part.id and part.type == "function" and part.function.name
                else:
                    assert part.index == len(calls) - 1 and part.id is None and part.function.name is None
                calls[-1]["arguments"] += part.function.arguments or ""
    return text, calls, reason, deltas


def test_b082_two_calls(caller: RunningServer) -> None:
    answer = ask(caller, "A", tools=TOOLS).choices[0]
    assert answer.finish_reason == "tool_calls" and answer.message.content == "I call."
    found = [(call.type, call.function.name, call.function.arguments) for call in answer.message.tool_calls]
    assert found == [("function", "f", '{"x": 1}'), ("function", "g", "{}")]
    text, calls, reason, deltas = streamed(caller, "A", tools=TOOLS)
    assert (text, reason) == ("I call.", "tool_calls")
    assert [(call["name"], call["arguments"]) for call in calls] == [("f", '{"x": 1}'), ("g", "{}")]
    assert len({call["id"] for call in calls}) == 2
    assert all(delta.content is None for delta in deltas if delta.tool_calls)


def test_b083_choices(caller: RunningServer) -> None:
    for value, count in ((False, 1), (True, 2)):
        options = {"tools": TOOLS, "parallel_tool_calls": value}
        assert len(ask(caller, "A", **options).choices[0].message.tool_calls) == count
        assert len(streamed(caller, "A", **options)[1]) == count
    none = ask(caller, "A", tools=TOOLS, tool_choice="none").choices[0]
    assert none.finish_reason == "stop" and none.message.tool_calls is None
    assert none.message.content.startswith("I call.\n<tool_call>\n{")
    without = ask(caller, "A").choices[0]
    assert without.message.content == none.message.content and without.message.tool_calls is None
    unknown = ask(caller, "A", tools=[tool("other")]).choices[0]
    assert unknown.message.content == none.message.content and unknown.finish_reason == "stop"
    text = ask(caller, "C", tools=TOOLS).choices[0]
    assert (text.message.content, text.finish_reason, text.message.tool_calls) == ("ok!", "stop", None)


def test_a_call_that_is_cut_is_not_complete(caller: RunningServer) -> None:
    for content, limit, reason in (("A", 4, "length"), ("B", 60, "stop"), ("B", 3, "length")):
        whole = ask(caller, content, tools=TOOLS, max_tokens=limit).choices[0]
        assert whole.finish_reason == reason
        _, calls, streamed_reason, _ = streamed(caller, content, tools=TOOLS, max_tokens=limit)
        assert streamed_reason == reason
        assert [call["arguments"] for call in calls] == [c.function.arguments for c in whole.message.tool_calls or []]


def test_logprobs_count_every_token(caller: RunningServer) -> None:
    answer = ask(caller, "A", tools=TOOLS, logprobs=True)
    assert len(answer.choices[0].logprobs.content) == answer.usage.completion_tokens
    entries = 0
    for chunk in ask(caller, "A", tools=TOOLS, logprobs=True, stream=True):
        entries += sum(len(choice.logprobs.content) for choice in chunk.choices if choice.logprobs)
    assert entries == answer.usage.completion_tokens


@pytest.mark.parametrize(
    ("choice", "names"),
    [("required", {"f", "g"}), ({"type": "function", "function": {"name": "f"}}, {"f"})],
)
def test_forced_calls_follow_their_schema(random: RunningServer, choice: Any, names: set[str]) -> None:
    tools = [tool("f", F, strict=True), tool("g", {"type": "object", "properties": {}, "additionalProperties": False})]
    options = {"tools": tools, "tool_choice": choice, "max_tokens": 300, "n": 4, "seed": 2}
    for chosen in ask(random, "hello", **options).choices:
        assert chosen.message.content is None
        assert chosen.finish_reason in ("tool_calls", "length")
        whole = chosen.message.tool_calls if chosen.finish_reason == "tool_calls" else chosen.message.tool_calls[:-1]
        for call in whole:
            assert call.function.name in names
            schema = F if call.function.name == "f" else {"type": "object", "maxProperties": 0}
            jsonschema.validate(json.loads(call.function.arguments), schema)
    one = {**options, "n": 1, "parallel_tool_calls": False}
    answer = ask(random, "hello", **one).choices[0]
    assert answer.finish_reason == "tool_calls" and len(answer.message.tool_calls) == 1
    text, calls, reason, _ = streamed(random, "hello", **one)
    assert (text, reason) == ("", "tool_calls")
    assert [call["arguments"] for call in calls] == [answer.message.tool_calls[0].function.arguments]


def test_strict_arguments_of_free_calls(random: RunningServer) -> None:
    """The model is led to a call; what it writes there follows the schema, though nothing forced the call."""
    tools = [tool("f", F, strict=True)]
    prefix = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "call: "}]
    bias = {str(byte): 30 for byte in b"<tool_call>"}
    answer = random.openai.chat.completions.create(
        model=random.model, messages=prefix, tools=tools, max_tokens=150, seed=3, n=6, logit_bias=bias
    )
    for choice in answer.choices:
        for call in choice.message.tool_calls or []:
            if choice.finish_reason == "tool_calls":
                jsonschema.validate(json.loads(call.function.arguments), F)


def test_a_form_for_the_answer_beside_tools(random: RunningServer) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    options = {"tools": [tool("f", F)], "response_format": form, "max_tokens": 300, "n": 8, "seed": 5}
    for choice in ask(random, "x", **options).choices:
        if choice.finish_reason == "stop":
            jsonschema.validate(json.loads(choice.message.content), schema)
        elif choice.finish_reason == "tool_calls":
            assert choice.message.content is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "absent"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": [tool("f"), tool("f")]}, "tools[1].function.name"),
        ({"tools": [tool("a b")]}, "tools[0].function.name"),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
            "tools[0].function.parameters",
        ),
        ({"tools": [5]}, "tools[0]"),
        ({"tools": [tool("f", {"not": {}}, strict=True)]}, "tools"),
        ({"tools": [tool("f", {"not": {}}, strict=True)], "tool_choice": "required"}, "tools"),
        ({"functions": [{"name": "f"}]}, "functions"),
    ],
)
def test_refusals(random: RunningServer, fields: dict, param: str) -> None:
    body = {"model": random.model, "messages": [{"role": "user", "content": "x"}], **fields}
    response = random.post("/v1/chat/completions", body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


def test_loose_schemas_are_not_refused(random: RunningServer) -> None:
    tools = [tool("f", {"type": "object", "not": {"required": ["z"]}})]
    answer = ask(random, "x", tools=tools, tool_choice="required", max_tokens=60, seed=1)
    assert answer.choices[0].message.tool_calls[0].function.name == "f"


def test_a_template_that_knows_no_tools(tiny: RunningServer) -> None:
    """The tools are told in a system message, and plain JSON is a call."""
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": [tool("f")]}
    tokens = tiny.post("/tokenize", body).json()["tokens"]
    text = tiny.post("/detokenize", {"tokens": tokens}).json()["prompt"]
    assert "<|im_start|>system\nYou may call functions" in text and '"name": "f"' in text
    flag = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    tools = [tool("f", flag)]
    answer = ask(tiny, "x", tools=tools, tool_choice="required", parallel_tool_calls=False, max_tokens=90)
    jsonschema.validate(json.loads(answer.choices[0].message.tool_calls[0].function.arguments), flag)


def test_arguments_as_templates_want_them() -> None:
    """Some templates print the arguments as an object, others add them to a text."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": "é"}'}}
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    loop = "{% for m in messages %}{% for c in m.tool_calls or [] %}%s{% endfor %}{% endfor %}"
    for body in ("{{ c.function.arguments | tojson }}", "{{ 'args: ' + c.function.arguments }}"):
        template = ChatTemplate({"default": loop.replace("%s", body)}, "test", {})
        text = template.render(messages, add_generation_prompt=False)
        assert json.loads(text.removeprefix("args: ")) == {"a": "é"}
