"""/v1/chat/completions: shapes, log-probabilities, limits, what messages may look like."""

from __future__ import annotations

import pytest
from http_server import RunningServer


def user(content: object) -> list[dict]:
    return [{"role": "user", "content": content}]


def error_of(server: RunningServer, **body: object) -> dict:
    """The error of a chat request that must be a 400."""
    response = server.post("/v1/chat/completions", {"model": server.model, "messages": user("e"), **body})
    assert response.status_code == 400, response.text
    return response.json()["error"]


def test_official_client(chain: RunningServer) -> None:
    answer = chain.openai.chat.completions.create(model=chain.model, messages=[{"role": "user", "content": "e"}])
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "abcd", "stop")
    assert answer.object == "chat.completion" and answer.model == chain.model and answer.usage is not None
    assert answer.usage.total_tokens == 6


def test_default_limit_is_the_context(chain: RunningServer) -> None:
    answer = chain.chat("0", max_completion_tokens=None)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == 256


def test_b004_logprobs(chain: RunningServer, tiny: RunningServer) -> None:
    for fields in ({}, {"top_logprobs": 0}):
        answer = chain.chat("U", logprobs=True, max_tokens=40, **fields)
        entries = answer["choices"][0]["logprobs"]["content"]
        assert len(entries) == answer["usage"]["completion_tokens"]
        assert all(set(entry) == {"token", "logprob", "bytes", "top_logprobs"} for entry in entries)
        assert all(entry["top_logprobs"] == [] for entry in entries)
        assert [len(entry["bytes"]) for entry in entries[:9]] == [1] * 9, "single bytes of split characters"
        joined = b"".join(bytes(entry["bytes"]) for entry in entries)
        assert joined == answer["choices"][0]["message"]["content"].encode()
    top = tiny.chat("hello", logprobs=True, top_logprobs=3, max_tokens=4)["choices"][0]["logprobs"]["content"]
    for entry in top:
        values = [candidate["logprob"] for candidate in entry["top_logprobs"]]
        assert len(values) == 3 and values == sorted(values, reverse=True)


@pytest.mark.parametrize("fields", [{"top_logprobs": 3, "logprobs": False}, {"top_logprobs": 3}])
def test_b004_top_logprobs_needs_logprobs(chain: RunningServer, fields: dict) -> None:
    assert error_of(chain, **fields)["param"] == "top_logprobs"


@pytest.mark.parametrize("number", [21, -1])
def test_b004_top_logprobs_limits(chain: RunningServer, number: int) -> None:
    assert error_of(chain, logprobs=True, top_logprobs=number)["param"] == "top_logprobs"


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        ({"max_completion_tokens": 3}, 3),
        ({"max_tokens": 3}, 3),
        ({"max_tokens": 3, "max_completion_tokens": 5}, 3),
        ({"max_tokens": 5, "max_completion_tokens": 3}, 3),
    ],
)
def test_b012_limits(chain: RunningServer, fields: dict, tokens: int) -> None:
    answer = chain.chat("0", ignore_eos=True, **fields)
    assert answer["usage"]["completion_tokens"] == tokens and answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("value", [0, -1])
def test_b012_limit_below_one(chain: RunningServer, name: str, value: int) -> None:
    assert error_of(chain, **{name: value})["param"] == name


def test_b013_null_content_with_tool_calls(tiny: RunningServer) -> None:
    call = {"id": "call-1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    counts = set()
    for assistant in ({"content": None}, {}):
        messages = [
            *user("What is it?"),
            {"role": "assistant", "tool_calls": [call], **assistant},
            {"role": "tool", "tool_call_id": "call-1", "content": "42"},
        ]
        counts.add(tiny.chat(messages, max_tokens=1)["usage"]["prompt_tokens"])
    assert len(counts) == 1
    assert error_of(tiny, messages=user(None))["param"] == "messages[0].content"


@pytest.mark.parametrize("role", ["user", "system", "assistant", "tool", "developer"])
def test_b068_parts_are_joined(tiny: RunningServer, role: str) -> None:
    def prompt_tokens(content: object) -> int:
        messages = [{"role": role, "content": content}, *user("go on")]
        return tiny.chat(messages, max_tokens=1)["usage"]["prompt_tokens"]

    parts = [{"type": "text", "text": "hi "}, {"type": "text", "text": "there"}]
    assert prompt_tokens(parts) == prompt_tokens("hi there")


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}},
        {"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}},
        {"type": "text"},
        {"type": "text", "text": 5},
        {"text": "no type"},
        {},
        "text",
    ],
)
def test_b068_malformed_parts(tiny: RunningServer, part: object) -> None:
    error = error_of(tiny, messages=user([{"type": "text", "text": "look"}, part]))
    assert error["param"].startswith("messages[0].content")


def test_developer_is_system(tiny: RunningServer) -> None:
    def tokens(role: str) -> list[int]:
        return tiny.post("/tokenize", {"messages": [{"role": role, "content": "Be kind."}]}).json()["tokens"]

    assert tokens("developer") == tokens("system") != tokens("user")


def test_continue_final_message(tiny: RunningServer) -> None:
    messages = [*user("Count"), {"role": "assistant", "content": "one two"}]
    body = {"messages": messages, "continue_final_message": True}
    text = tiny.post("/detokenize", {"tokens": tiny.post("/tokenize", body).json()["tokens"]}).json()["prompt"]
    assert text.endswith("<|im_start|>assistant\none two")
    assert tiny.chat(messages, continue_final_message=True, max_tokens=1)["usage"]["prompt_tokens"] == len(text) - 2 * (
        len("<|im_start|>") - 1
    ) - (len("<|im_end|>") - 1)
    error = error_of(tiny, messages=messages, continue_final_message=True, add_generation_prompt=True)
    assert error["param"] == "continue_final_message"


def test_too_long_conversation(chain: RunningServer) -> None:
    error = error_of(chain, messages=user("e" * 300))
    assert error["code"] == "context_length_exceeded" and error["param"] == "messages"
    assert "256" in error["message"] and "300" in error["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tool_choice", "required"),
        ("functions", [{"name": "f"}]),
        ("modalities", ["text", "audio"]),
        ("chat_template", "{{ messages }}"),
        ("messages", []),
    ],
)
def test_refused_fields(chain: RunningServer, field: str, value: object) -> None:
    assert error_of(chain, **{field: value})["param"] == field


def test_prompt_logprobs(chain: RunningServer) -> None:
    answer = chain.chat("eab", prompt_logprobs=0, max_tokens=1)
    assert answer["prompt_logprobs"][0] is None and len(answer["prompt_logprobs"]) == 3
    assert [next(iter(row.values()))["decoded_token"] for row in answer["prompt_logprobs"][1:]] == ["a", "b"]
