"""/v1/messages through Anthropic's client: answers, events in order, blocks, errors."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from http_server import RunningServer, counting_server


def connect(server: RunningServer, key: str = "none") -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key=key, max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def claude(chain: RunningServer) -> Iterator[anthropic.Anthropic]:
    with connect(chain) as client:
        yield client


def ask(client: anthropic.Anthropic, content: Any = "e", **fields: Any) -> Any:
    messages = content if isinstance(content, list) else [{"role": "user", "content": content}]
    return client.messages.create(**{"model": "chain", "max_tokens": 20, "messages": messages, **fields})


def test_official_client(claude: anthropic.Anthropic) -> None:
    answer = ask(claude)
    assert [(block.type, block.text) for block in answer.content] == [("text", "abcd")]
    assert (answer.role, answer.type, answer.model, answer.stop_reason) == ("assistant", "message", "chain", "end_turn")
    assert answer.id.startswith("msg_") and answer.stop_sequence is None
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (1, 5)


def test_stop_reasons(claude: anthropic.Anthropic) -> None:
    short = ask(claude, max_tokens=2)
    assert (short.content[0].text, short.stop_reason) == ("ab", "max_tokens")
    stopped = ask(claude, stop_sequences=["zz", "cd"])
    assert (stopped.content[0].text, stopped.stop_reason, stopped.stop_sequence) == ("ab", "stop_sequence", "cd")


def test_events_in_order(claude: anthropic.Anthropic) -> None:
    events = list(ask(claude, stream=True))
    kinds = [kind for kind, _ in itertools.groupby(event.type for event in events)]
    assert kinds == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert events[0].message.content == [] and events[0].message.stop_reason is None
    assert events[0].message.usage.input_tokens == 1
    assert "".join(event.delta.text for event in events if event.type == "content_block_delta") == "abcd"
    assert events[-2].delta.stop_reason == "end_turn" and events[-2].usage.output_tokens == 5


def test_stream_helper_accumulates(claude: anthropic.Anthropic) -> None:
    messages: Any = [{"role": "user", "content": "e"}]
    with claude.messages.stream(model="chain", max_tokens=20, messages=messages, stop_sequences=["d"]) as stream:
        assert "".join(stream.text_stream) == "abc"
        final = stream.get_final_message()
    assert (final.content[0].text, final.stop_sequence) == ("abc", "d")
    assert final.usage.output_tokens == 4


def test_an_empty_answer_is_a_text(claude: anthropic.Anthropic) -> None:
    assert [(block.type, block.text) for block in ask(claude, "\x01").content] == [("text", "")]
    assert [event.type for event in ask(claude, "\x01", stream=True)][1:3] == [
        "content_block_start",
        "content_block_stop",
    ]


def test_prefill_is_gone_on_with(tiny: RunningServer) -> None:
    greedy = {"temperature": 0.0, "ignore_eos": True}
    messages: list[dict[str, Any]] = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "The"}]
    with connect(tiny) as client:
        answer = ask(client, messages, model=tiny.model, max_tokens=5, extra_body=greedy)
    chat = tiny.chat(messages, continue_final_message=True, max_tokens=5, **greedy)
    assert answer.content[0].text == chat["choices"][0]["message"]["content"]


def test_same_prompt_as_chat(tiny: RunningServer) -> None:
    """System blocks, thinking, calls of tools and their results make the conversation that chat would be given."""
    blocks: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": "What "}, {"type": "text", "text": "is it?"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "x"},
                {"type": "text", "text": "Let me see."},
                {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "42"}]},
                {"type": "text", "text": "And?"},
            ],
        },
    ]
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    messages = [
        {"role": "system", "content": "You count."},
        {"role": "user", "content": "What is it?"},
        {"role": "assistant", "reasoning_content": "hm", "content": "Let me see.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
        {"role": "user", "content": "And?"},
    ]
    system: Any = [{"type": "text", "text": "You count."}]
    with connect(tiny) as client:
        count = client.messages.count_tokens(model=tiny.model, messages=blocks, system=system).input_tokens
        answer = ask(client, blocks, model=tiny.model, system=system, max_tokens=1)
    expected = tiny.chat(messages, max_tokens=1)["usage"]["prompt_tokens"]
    assert count == expected == answer.usage.input_tokens + answer.usage.cache_read_input_tokens


def test_cached_tokens(tiny: RunningServer) -> None:
    text = "a long question " * 3
    with connect(tiny) as client:
        first = ask(client, text, model=tiny.model, max_tokens=1, extra_body={"cache_salt": "anthropic"}).usage
        again = ask(client, text, model=tiny.model, max_tokens=1, extra_body={"cache_salt": "anthropic"}).usage
    assert first.cache_read_input_tokens == 0 < again.cache_read_input_tokens
    assert again.cache_read_input_tokens + again.input_tokens == first.input_tokens


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "messages[0].content[0]"),
        ({"temperature": -1}, "temperature"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"tools": [{"type": "computer_20250124", "name": "c"}]}, "tools[0]"),
        ({"messages": [{"role": "user", "content": "x" * 300}]}, "tokens"),
    ],
)
def test_refused(claude: anthropic.Anthropic, fields: dict[str, Any], word: str) -> None:
    body = {"model": "chain", "max_tokens": 5, "messages": [{"role": "user", "content": "e"}], **fields}
    with pytest.raises(anthropic.BadRequestError) as error:
        claude.post("/v1/messages", body=body, cast_to=object)
    envelope: Any = error.value.body
    assert envelope["type"] == "error" and envelope["error"]["type"] == "invalid_request_error"
    assert word in envelope["error"]["message"]


def test_errors(claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as error:
        ask(claude, model="other")
    assert error.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    with pytest.raises(anthropic.NotFoundError):
        claude.get("/v1/messages/none", cast_to=object)


def test_keys() -> None:
    with counting_server(server={"api_keys": ("secret",)}) as server:
        with connect(server, "wrong") as client, pytest.raises(anthropic.AuthenticationError) as error:
            ask(client, model=server.model)
        assert error.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]
        with connect(server, "secret") as client:
            assert ask(client, model=server.model, max_tokens=2, extra_body={"ignore_eos": True}).stop_reason


def test_a_failure_in_the_stream() -> None:
    with counting_server("RaisingCore") as server, connect(server) as client:
        stream = ask(client, model=server.model, stream=True, max_tokens=50, extra_body={"ignore_eos": True})
        with pytest.raises(anthropic.APIStatusError, match="fifth step"):
            list(stream)


def test_small_budgets_and_results_of_no_call(claude: anthropic.Anthropic) -> None:
    for budget in (0, 1023, 2000.5):
        with pytest.raises(anthropic.BadRequestError, match="at least 1024"):
            ask(claude, thinking={"type": "enabled", "budget_tokens": budget})
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c9", "content": "42"}]}
    with pytest.raises(anthropic.BadRequestError, match="'c9', which no earlier tool_use has"):
        ask(claude, [{"role": "user", "content": "e"}, result])
