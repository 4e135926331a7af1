"""Streams: the same text as without, one finish_reason per choice, usage only when asked for, whole characters only."""

from __future__ import annotations

from typing import Any

import pytest
from http_server import RunningServer

WHOLE = "é你😀👨‍👩‍👧"


def chat_body(content: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], **fields}


def streamed_chat(server: RunningServer, content: str, **fields: Any) -> dict[int, list[dict]]:
    """The chunk choices of each index, in order."""
    events = server.events("/v1/chat/completions", chat_body(content, **fields))
    assert events[-1] == {"done": True}
    choices: dict[int, list[dict]] = {}
    for event in events[:-1]:
        for choice in event["choices"]:
            choices.setdefault(choice["index"], []).append(choice)
    return choices


def joined(choices: list[dict]) -> str:
    return "".join(choice["delta"].get("content", "") for choice in choices)


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": None}])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_b002_no_usage_unless_asked(chain: RunningServer, path: str, options: dict | None) -> None:
    body = {**chat_body("e"), "prompt": "e"} | ({} if options is None else {"stream_options": options})
    events = chain.events(path, body)[:-1]
    assert events and all(event.get("usage") is None and event["choices"] for event in events)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_usage_in_the_last_chunk(chain: RunningServer, path: str) -> None:
    body = {**chat_body("e"), "prompt": "e", "stream_options": {"include_usage": True}}
    *chunks, last, done = chain.events(path, body)
    assert done == {"done": True} and last["choices"] == []
    assert all("usage" in chunk and chunk["usage"] is None for chunk in chunks)
    assert last["usage"]["prompt_tokens"] == 1 and last["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize("stream", [False, None])
def test_b002_options_need_stream(chain: RunningServer, stream: bool | None) -> None:
    body = {"model": chain.model, **chat_body("e"), "stream": stream, "stream_options": {"include_usage": True}}
    response = chain.post("/v1/chat/completions", body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "stream_options"
    assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("stop", "expected", "reason"),
    [(["STOP"], "xy", "STOP"), (["STOQ"], "xySTOPz", None), (["yS", "STOP"], "x", "yS"), ("z", "xySTOP", "z")],
)
def test_b010_stop_strings(chain: RunningServer, stop: Any, expected: str, reason: str | None) -> None:
    whole = chain.chat("w", stop=stop)["choices"][0]
    assert (whole["message"]["content"], whole["finish_reason"]) == (expected, "stop")
    assert whole["stop_reason"] == reason
    streamed = streamed_chat(chain, "w", stop=stop)[0]
    assert joined(streamed) == expected
    assert not any("S" in choice["delta"].get("content", "") for choice in streamed) or "S" in expected
    events = chain.events("/v1/completions", {"prompt": "w", "stop": stop})
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == expected


@pytest.mark.parametrize(
    ("content", "fields", "reason", "text"),
    [
        ("e", {}, "stop", "abcd"),
        ("0", {"max_tokens": 7}, "length", "1234567"),
        ("w", {"stop": "ST"}, "stop", "xy"),
        ("!", {}, "stop", ""),
    ],
)
@pytest.mark.parametrize("n", [1, 2])
def test_b015_one_finish_reason(
    chain: RunningServer, content: str, fields: dict, reason: str, text: str, n: int
) -> None:
    choices = streamed_chat(chain, content, n=n, **fields)
    assert sorted(choices) == list(range(n))
    for chunks in choices.values():
        assert chunks[0]["delta"]["role"] == "assistant"
        assert [chunk["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + [reason]
        assert joined(chunks) == text and joined(chunks[-1:]) == ""


def test_b015_end_of_text_as_first_token(chain: RunningServer) -> None:
    answer = chain.chat("!")
    assert answer["choices"][0]["message"]["content"] == "" and answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"logprobs": True}])
def test_b061_no_split_characters(chain: RunningServer, fields: dict) -> None:
    for chunks in streamed_chat(chain, "U", max_tokens=40, **fields).values():
        pieces = [chunk["delta"].get("content", "") for chunk in chunks]
        assert "".join(pieces) == WHOLE and not any("\ufffd" in piece for piece in pieces)
        if "logprobs" in fields:
            entries = [entry for chunk in chunks for entry in (chunk["logprobs"] or {}).get("content", [])]
            assert b"".join(bytes(entry["bytes"]) for entry in entries) == WHOLE.encode()
    usage = chain.chat("U", max_tokens=40)["usage"]
    assert usage["completion_tokens"] == 9 + 5 + 1, "nine single bytes, five pieces, the end"


def test_b061_stop_at_a_split_character(chain: RunningServer) -> None:
    assert chain.chat("U", stop="你")["choices"][0]["message"]["content"] == "é"
    assert joined(streamed_chat(chain, "U", stop="你")[0]) == "é"


def test_b061_payload_is_utf8(chain: RunningServer) -> None:
    body = {"model": chain.model, "stream": True, **chat_body("U", max_tokens=40)}
    with chain.http.stream("POST", "/v1/chat/completions", json=body) as response:
        raw = b"".join(response.iter_raw())
    assert all(line.decode() or not line for line in raw.split(b"\n"))


@pytest.mark.parametrize(
    ("content", "max_tokens", "expected"),
    [("U", 8, "é你\ufffd"), ("g", 10, "\ufffdh"), ("i", 10, "\ufffdj"), ("g", 1, "\ufffd")],
)
def test_b062_incomplete_characters(chain: RunningServer, content: str, max_tokens: int, expected: str) -> None:
    assert chain.chat(content, max_tokens=max_tokens)["choices"][0]["message"]["content"] == expected
    assert joined(streamed_chat(chain, content, max_tokens=max_tokens)[0]) == expected


def test_official_client(chain: RunningServer) -> None:
    stream = chain.openai.chat.completions.create(
        model=chain.model,
        messages=[{"role": "user", "content": "w"}],
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "xySTOPz"
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 8
    assert len({chunk.id for chunk in chunks}) == 1


def test_refused_streams_are_4xx(chain: RunningServer) -> None:
    for fields in ({"temperature": -1}, {"messages": [{"role": "user", "content": "e" * 400}]}, {"model": "none"}):
        body = {"model": chain.model, "stream": True, **chat_body("e"), **fields}
        response = chain.post("/v1/chat/completions", body)
        assert response.status_code in (400, 404) and "error" in response.json()
