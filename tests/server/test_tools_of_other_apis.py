"""Thoughts and calls of tools through /v1/responses and /v1/messages, with the official clients."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from chain_model import build_chain_model
from http_server import RunningServer, running_server

SCRIPTS: list[list[bytes | str]] = [
    [
        "A", b"<think>h", b"m", b"</think>", b"I call.\n", b'<tool_call>\n{"name": "f", "arguments": {"x"', b": ", b"1",
        b"}}\n</tool_call>", b"\n<tool_call>", b'{"name": "g"', b', "arguments": {}}', b"</tool_call>",
    ],
]  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% endfor %}{% if tools %}{# <tool_call> #}{% endif %}{# <think> </think> #}"
)
PARAMETERS = {"type": "object", "properties": {"x": {"type": "integer"}}}


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A scripted model that thinks, then calls twice."""
    folder = tmp_path_factory.mktemp("caller")
    build_chain_model(folder, SCRIPTS, chat_template=TEMPLATE)
    with running_server(folder, num_threads=1) as server:
        yield server


def respond(server: RunningServer, **fields: Any) -> Any:
    tools: Any = [{"type": "function", "name": name, "parameters": PARAMETERS, "strict": False} for name in "fg"]
    return server.openai.responses.create(model=server.model, input="A", tools=tools, max_output_tokens=60, **fields)


def test_responses(caller: RunningServer) -> None:
    answer = respond(caller)
    assert [item.type for item in answer.output] == ["reasoning", "message", "function_call", "function_call"]
    assert answer.output[0].content[0].text == "hm" and answer.output_text.strip() == "I call."
    calls = answer.output[2:]
    assert [(call.name, call.arguments) for call in calls] == [("f", '{"x": 1}'), ("g", "{}")]
    assert answer.status == "completed" and len({call.call_id for call in calls}) == 2
    results: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "42"} for call in calls]
    following = caller.openai.responses.create(
        model=caller.model, input=results, previous_response_id=answer.id, max_output_tokens=1
    )
    assert following.usage.input_tokens > answer.usage.input_tokens


def test_responses_as_a_stream(caller: RunningServer) -> None:
    events = list(respond(caller, stream=True))
    kinds = [kind.removeprefix("response.") for kind, _ in itertools.groupby(event.type for event in events)]
    text = ["output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done"]
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    thought = [kind.replace("output_text", "reasoning_text") for kind in text]
    expected = ["created", "in_progress", *thought, "output_item.done", *text, "output_item.done", *call, *call]
    assert kinds == [*expected, "completed"]
    final = events[-1].response
    for index, item in enumerate(final.output):
        ours = [event for event in events if getattr(event, "output_index", None) == index]
        assert ours[0].type == "response.output_item.added" and ours[-1].item == item
    deltas = [event for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(event.delta for event in deltas if event.output_index == 2) == '{"x": 1}'


def ask(server: RunningServer, client: anthropic.Anthropic, **fields: Any) -> Any:
    tools: Any = [{"name": name, "description": "does it", "input_schema": PARAMETERS} for name in "fg"]
    thinking: Any = {"type": "enabled", "budget_tokens": 1024}
    messages: Any = [{"role": "user", "content": "A"}]
    return client.messages.create(
        model=server.model, max_tokens=60, messages=messages, tools=tools, thinking=thinking, **fields
    )


def test_messages(caller: RunningServer) -> None:
    with anthropic.Anthropic(base_url=caller.url, api_key="none", max_retries=0) as client:
        answer = ask(caller, client)
        assert [block.type for block in answer.content] == ["thinking", "text", "tool_use", "tool_use"]
        thought, text, first, second = answer.content
        assert (thought.thinking, text.text.strip(), answer.stop_reason) == ("hm", "I call.", "tool_use")
        assert [(first.name, first.input), (second.name, second.input)] == [("f", {"x": 1}), ("g", {})]
        one = ask(caller, client, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
        assert [block.type for block in one.content].count("tool_use") == 1
        history: Any = [
            {"role": "user", "content": "A"},
            {"role": "assistant", "content": [block.to_dict() for block in answer.content]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": first.id, "content": "42"}]},
        ]
        assert client.messages.create(model=caller.model, max_tokens=1, messages=history).role == "assistant"


def test_messages_as_a_stream(caller: RunningServer) -> None:
    with anthropic.Anthropic(base_url=caller.url, api_key="none", max_retries=0) as client:
        events = list(ask(caller, client, stream=True))
        starts = [event.content_block.type for event in events if event.type == "content_block_start"]
        assert starts == ["thinking", "text", "tool_use", "tool_use"]
        indices = [event.index for event in events if hasattr(event, "index")]
        assert indices == sorted(indices) and set(indices) == {0, 1, 2, 3}
        parts = [event.delta for event in events if event.type == "content_block_delta" and event.index == 2]
        assert "".join(part.partial_json for part in parts) == '{"x": 1}'
        assert events[-2].delta.stop_reason == "tool_use"


def test_a_thinking_budget_for_a_model_without_thoughts(chain: RunningServer) -> None:
    with anthropic.Anthropic(base_url=chain.url, api_key="none", max_retries=0) as client:
        messages: Any = [{"role": "user", "content": "e"}]
        thinking: Any = {"type": "enabled", "budget_tokens": 1024}
        answer = client.messages.create(model=chain.model, max_tokens=20, messages=messages, thinking=thinking)
        assert answer.content[0].text == "abcd"
