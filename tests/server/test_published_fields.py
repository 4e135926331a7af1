"""Every field that the official clients can send is honoured, refused by name, or noted: none is ignored in silence."""

from __future__ import annotations

import typing
from pathlib import Path
from typing import Any

import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from http_server import RunningServer
from openai.types import chat as chat_types
from openai.types import completion_create_params, embedding_create_params, shared_params
from openai.types import responses as response_types
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params
from twofold.server import completion_schema, embeddings, schema
from twofold.server.chat_schema import ChatRequest, Message
from twofold.server.messages import schema as messages
from twofold.server.responses import schema as responses

DOCS = Path(__file__).parents[2] / "docs" / "server.md"
CHAT = {"messages": [{"role": "user", "content": "e"}]}
CHAT_REFUSED = tuple(set(schema.REFUSED) - ChatRequest.served)
# (path, fields that make a request, what the client can send, our body, what is refused, what is only noted).
SHAPES: dict[str, tuple[dict[str, Any], Any, type[Any], tuple[str, ...], tuple[str, ...]]] = {
    "/v1/completions": (
        {"prompt": "e"},
        completion_create_params.CompletionCreateParamsBase,
        completion_schema.CompletionRequest,
        tuple(schema.REFUSED),
        schema.NOTED,
    ),
    "/v1/chat/completions": (
        CHAT,
        chat_create_params.CompletionCreateParamsBase,
        ChatRequest,
        CHAT_REFUSED,
        schema.NOTED,
    ),
    "/v1/responses": (
        {"input": "e"},
        response_create_params.ResponseCreateParamsBase,
        responses.ResponseRequest,
        tuple(responses.REFUSED),
        responses.NOTED,
    ),
    "/v1/embeddings": (
        {"input": "e"},
        embedding_create_params.EmbeddingCreateParams,
        embeddings.EmbeddingRequest,
        (),
        ("user",),
    ),
    "/v1/messages": (
        {**CHAT, "max_tokens": 5},
        message_create_params.MessageCreateParamsBase,
        messages.MessagesRequest,
        tuple(messages.REFUSED),
        messages.NOTED,
    ),
    "/v1/messages/count_tokens": (
        CHAT,
        message_count_tokens_params.MessageCountTokensParams,
        messages.CountTokensRequest,
        tuple(messages.REFUSED),
        messages.NOTED,
    ),
}
WRONG = {"no": ["such", {"value": 1}]}


def published(shape: Any) -> set[str]:
    """The fields of one of the client's TypedDicts."""
    return set(typing.get_type_hints(shape))


def fields(kind: str) -> list[tuple[str, str]]:
    """(path, field) of all published fields that are ``served``, ``refused`` or ``noted``."""
    found = []
    for path, (_, shape, _, refused, noted) in SHAPES.items():
        for name in sorted(published(shape)):
            if kind == ("refused" if name in refused else "noted" if name in noted else "served"):
                found.append((path, name))
    return found


@pytest.mark.parametrize("path", SHAPES)
def test_every_published_field_is_known(path: str) -> None:
    _, shape, body, _, _ = SHAPES[path]
    unknown = published(shape) - set(body.__struct_fields__)
    assert not unknown, f"the client can send fields that {body.__name__} drops: serve, refuse or note them"


@pytest.mark.parametrize(("path", "name"), [*fields("refused"), *fields("served")])
def test_what_makes_no_sense_is_a_400(chain: RunningServer, path: str, name: str) -> None:
    """Refused fields whatever they ask for; served ones are read, so that a wrong value is told."""
    request, _, _, refused, _ = SHAPES[path]
    responses = [chain.post(path, {"model": chain.model, **request, name: value}) for value in (WRONG, -12345678.5)]
    told = [response for response in responses if response.status_code == 400]
    assert told and (len(told) == 2 or name not in refused), [response.text for response in responses]
    assert all(name in response.json()["error"]["message"] for response in told)


@pytest.mark.parametrize("path", SHAPES)
def test_noted_fields_change_nothing(chain: RunningServer, path: str) -> None:
    request, shape, _, _, noted = SHAPES[path]
    told = {name: {"a": "b"} if name in ("metadata", "cache_control") else "auto" for name in noted}
    told = {name: value for name, value in told.items() if name in published(shape)}
    assert told
    answers = [chain.post(path, {"model": chain.model, **request, **extra}).json() for extra in ({}, told)]
    assert not answers[1].get("error")
    shown = [answer.get("choices") or answer.get("content") or answer.get("data") for answer in answers]
    assert shown[0] == shown[1] and answers[0].get("usage") == answers[1].get("usage")
    for name in told:
        assert f"`{name}`" in DOCS.read_text(), f"docs/server.md does not say that {name} has no effect"


@pytest.mark.parametrize(
    ("path", "name", "values"),
    [
        ("/v1/chat/completions", "service_tier", ["auto", "default", None]),
        ("/v1/chat/completions", "store", [False]),
        ("/v1/chat/completions", "verbosity", ["medium"]),
        ("/v1/chat/completions", "prompt_cache_options", [{"mode": "implicit"}]),
        ("/v1/responses", "truncation", ["auto", "disabled"]),
        ("/v1/responses", "include", [["reasoning.encrypted_content"], ["message.output_text.logprobs"]]),
        ("/v1/responses", "text", [{"verbosity": "medium"}]),
        ("/v1/responses", "reasoning", [{"summary": "auto", "context": "auto", "mode": "standard"}]),
        ("/v1/messages", "speed", ["standard"]),
        ("/v1/messages", "thinking", [{"type": "adaptive"}, {"type": "disabled"}, {"type": "enabled"}]),
        ("/v1/messages", "output_config", [{"effort": "low"}]),
    ],
)
def test_values_that_ask_for_nothing_pass(chain: RunningServer, path: str, name: str, values: list[Any]) -> None:
    for value in values:
        response = chain.post(path, {"model": chain.model, **SHAPES[path][0], name: value})
        assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("path", "extra", "param"),
    [
        ("/v1/chat/completions", {"store": True}, "store"),
        ("/v1/chat/completions", {"service_tier": "priority"}, "service_tier"),
        ("/v1/chat/completions", {"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options"),
        ("/v1/chat/completions", {"stream_options": {"include_usage": True}}, "stream_options"),
        ("/v1/chat/completions", {"best_of": 2}, "best_of"),
        ("/v1/chat/completions", {"messages": [{"role": "assistant", "function_call": {"name": "f"}}]}, "messages[0]"),
        ("/v1/chat/completions", {"messages": [{"role": "assistant", "audio": {"id": "a"}}]}, "messages[0].audio"),
        ("/v1/responses", {"include": ["everything"]}, "include"),
        ("/v1/responses", {"include": ["web_search_call.results"]}, "include"),
        ("/v1/responses", {"text": {"verbosity": "low"}}, "text.verbosity"),
        ("/v1/responses", {"reasoning": {"mode": "pro"}}, "reasoning.mode"),
        ("/v1/responses", {"reasoning": {"context": "all_turns"}}, "reasoning.context"),
        ("/v1/responses", {"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options"),
        ("/v1/responses", {"input": [{"type": "reasoning", "encrypted_content": "?"}]}, "input[0].encrypted_content"),
    ],
)
def test_what_is_not_done_is_refused_by_name(
    chain: RunningServer, path: str, extra: dict[str, Any], param: str
) -> None:
    response = chain.post(path, {"model": chain.model, **SHAPES[path][0], **extra})
    assert response.status_code == 400 and response.json()["error"]["param"].startswith(param), response.text


@pytest.mark.parametrize(("given", "word"), [({"type": "between_tools"}, "type"), ({"display": "all"}, "display")])
def test_thinking_of_other_kinds(chain: RunningServer, given: dict[str, str], word: str) -> None:
    response = chain.post("/v1/messages", {"model": chain.model, **CHAT, "max_tokens": 5, "thinking": given})
    assert response.status_code == 400 and f"thinking.{word}" in response.json()["error"]["message"]


def test_fields_within_fields() -> None:
    """Messages, reasoning, text and stream options: their published keys are known too."""
    for shape in typing.get_args(chat_types.ChatCompletionMessageParam):
        assert published(shape) <= set(Message.__struct_fields__)
    reasoning = {"effort", "summary", "generate_summary", *responses.REASONING_REFUSED}
    assert published(shared_params.Reasoning) <= reasoning
    assert published(response_types.ResponseTextConfigParam) <= {"format", *responses.TEXT_REFUSED}
    assert published(chat_types.ChatCompletionStreamOptionsParam) <= set(schema.StreamOptions.__struct_fields__)
    assert set(typing.get_args(response_types.ResponseIncludable)) <= {*responses.INCLUDABLE, *responses.NOT_INCLUDABLE}


def test_a_refusal_in_the_history_is_its_text(chain: RunningServer) -> None:
    turns = [{"role": "assistant", "content": None, "refusal": "e"}]
    answer = chain.chat(turns)
    assert answer["choices"][0]["message"]["content"] == "abcd"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_continuous_usage(chain: RunningServer, path: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *events, last, done = chain.events(path, {**SHAPES[path][0], "stream_options": options})
    assert done == {"done": True} and all(event["usage"]["prompt_tokens"] == 1 for event in events)
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts) and counts[-1] == last["usage"]["completion_tokens"]
