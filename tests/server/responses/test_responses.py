"""/v1/responses through OpenAI's client: answers, events in order, what is remembered, and for whom."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from http_server import RunningServer, counting_server


@pytest.fixture(scope="module")
def slow() -> Iterator[RunningServer]:
    """Counts up from the end of the template with a pause after each token."""
    with counting_server("SlowCore") as server:
        yield server


def create(server: RunningServer, text: Any = "e", **fields: Any) -> Any:
    return server.openai.responses.create(model=server.model, input=text, **fields)


def test_official_client(chain: RunningServer) -> None:
    answer = create(chain, metadata={"a": "b"}, temperature=0.5, user="me")
    assert (answer.output_text, answer.status, answer.error) == ("abcd", "completed", None)
    assert answer.id.startswith("resp_") and answer.model == chain.model and answer.object == "response"
    message = answer.output[0]
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
    assert answer.metadata == {"a": "b"} and answer.temperature == 0.5 and answer.user == "me"
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens == 6
    chat = chain.chat("e")
    assert chat["usage"]["prompt_tokens"] == answer.usage.input_tokens


def test_limit_is_incomplete(chain: RunningServer) -> None:
    answer = create(chain, max_output_tokens=2)
    assert (answer.output_text, answer.status) == ("ab", "incomplete")
    assert answer.incomplete_details.reason == "max_output_tokens" and answer.output[0].status == "incomplete"


def test_events_in_order(chain: RunningServer) -> None:
    events = list(create(chain, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [kind for kind, _ in itertools.groupby(event.type for event in events)]
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    texts = [event.delta for event in events if event.type == "response.output_text.delta"]
    last = events[-1].response
    assert "".join(texts) == events[-4].text == last.output_text == "abcd"
    assert events[0].response.status == "in_progress" and events[0].response.output == []
    assert {event.item_id for event in events if hasattr(event, "item_id")} == {last.output[0].id}
    assert last.usage.output_tokens == 5 and last.status == "completed"


def test_raw_stream(chain: RunningServer) -> None:
    body = {"model": chain.model, "input": "e", "stream": True}
    text = chain.post("/v1/responses", body).text
    assert text.startswith("event: response.created\ndata: {") and "[DONE]" not in text and text.endswith("}\n\n")


def test_stream_helper_accumulates(chain: RunningServer) -> None:
    with chain.openai.responses.stream(model=chain.model, input="e", max_output_tokens=3) as stream:
        kinds = [event.type for event in stream]
    assert kinds[-1] == "response.incomplete"
    with chain.openai.responses.stream(model=chain.model, input="e") as stream:
        assert stream.get_final_response().output_text == "abcd"


def test_same_prompt_as_chat(tiny: RunningServer) -> None:
    """Instructions, parts, earlier turns, calls and their results make the conversation that chat would be given."""
    items = [
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "What "}, {"type": "input_text", "text": "is it?"}],
        },
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "42"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "It is 42."}]},
        {"role": "developer", "content": "Be short."},
    ]
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "system", "content": "You count."},
        {"role": "user", "content": "What is it?"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
        {"role": "assistant", "content": "It is 42."},
        {"role": "developer", "content": "Be short."},
    ]
    fields: dict[str, Any] = {"temperature": 0.0, "extra_body": {"ignore_eos": True}}
    answer = create(tiny, items, instructions="You count.", max_output_tokens=6, **fields)
    chat = tiny.openai.chat.completions.create(model=tiny.model, messages=messages, max_tokens=6, **fields)
    assert answer.usage.input_tokens == chat.usage.prompt_tokens
    assert answer.output_text == chat.choices[0].message.content


def test_previous_response(tiny: RunningServer) -> None:
    fields: dict[str, Any] = {"max_output_tokens": 4, "temperature": 0.0, "extra_body": {"ignore_eos": True}}
    first = create(tiny, "one", instructions="Be kind.", **fields)
    second = create(tiny, "two", previous_response_id=first.id, **fields)
    third = create(tiny, "three", previous_response_id=second.id, **fields)
    messages = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": second.output_text},
        {"role": "user", "content": "three"},
    ]
    chat = tiny.chat(messages, max_tokens=4, temperature=0.0, ignore_eos=True)
    assert third.output_text == chat["choices"][0]["message"]["content"], "instructions do not carry over"
    assert third.usage.input_tokens == chat["usage"]["prompt_tokens"]
    assert third.previous_response_id == second.id
    tiny.openai.responses.delete(first.id)
    with pytest.raises(openai.BadRequestError) as error:
        create(tiny, "four", previous_response_id=third.id, **fields)
    assert error.value.code == "previous_response_not_found" and error.value.param == "previous_response_id"
    assert first.id in str(error.value)


def test_get_and_delete(chain: RunningServer) -> None:
    answer = create(chain)
    assert chain.openai.responses.retrieve(answer.id).to_dict() == answer.to_dict()
    assert chain.http.delete(f"/v1/responses/{answer.id}").json() == {
        "id": answer.id,
        "object": "response",
        "deleted": True,
    }
    for call in (chain.openai.responses.retrieve, chain.openai.responses.delete, chain.openai.responses.cancel):
        with pytest.raises(openai.NotFoundError):
            call(answer.id)


def test_streamed_responses_are_stored(chain: RunningServer) -> None:
    last = list(create(chain, stream=True))[-1].response
    assert chain.openai.responses.retrieve(last.id).to_dict() == last.to_dict()


def test_store_false(chain: RunningServer) -> None:
    answer = create(chain, store=False)
    assert answer.output_text == "abcd"
    with pytest.raises(openai.NotFoundError):
        chain.openai.responses.retrieve(answer.id)


def test_input_items(chain: RunningServer) -> None:
    items = [{"role": "user", "content": letter} for letter in "wfe"]
    answer = create(chain, items)
    listed = list(chain.openai.responses.input_items.list(answer.id, order="asc", limit=2))
    assert [item.content for item in listed] == ["w", "f", "e"], "the client follows has_more"
    assert len({item.id for item in listed}) == 3
    newest = chain.openai.responses.input_items.list(answer.id, limit=1)
    assert [item.content for item in newest.data] == ["e"] and newest.has_more


def test_background(slow: RunningServer) -> None:
    answer = create(slow, "a", background=True, max_output_tokens=5, extra_body={"ignore_eos": True})
    assert answer.status == "queued"
    deadline = time.monotonic() + 100
    while (found := slow.openai.responses.retrieve(answer.id)).status in ("queued", "in_progress"):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert (found.status, found.output_text) == ("incomplete", "<=>?@")
    assert slow.openai.responses.cancel(answer.id).status == "incomplete", "what has ended stays as it is"


def test_cancel(slow: RunningServer) -> None:
    answer = create(slow, "a", background=True, extra_body={"ignore_eos": True})
    with pytest.raises(openai.BadRequestError):
        create(slow, "b", previous_response_id=answer.id)
    assert slow.openai.responses.cancel(answer.id).status == "cancelled"
    assert slow.openai.responses.retrieve(answer.id).status == "cancelled"
    slow.wait_idle()
    other = create(slow, "a", max_output_tokens=1)
    with pytest.raises(openai.BadRequestError, match="background"):
        slow.openai.responses.cancel(other.id)


def test_a_failure_in_the_stream() -> None:
    with counting_server("RaisingCore") as server:
        events = list(create(server, "a", stream=True, max_output_tokens=50, extra_body={"ignore_eos": True}))
        assert events[0].type == "response.created" and events[-1].type == "response.failed"
        assert events[-1].response.error.code == "server_error"


def test_kept_in_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    with counting_server(server={"state_dir": str(folder)}) as server:
        answer = create(server, "a", max_output_tokens=3, extra_body={"ignore_eos": True})
        server.state.database.close()
    assert (folder / "server.db").stat().st_mode & 0o077 == 0
    with counting_server(server={"state_dir": str(folder)}) as server:
        assert server.openai.responses.retrieve(answer.id).output_text == "<=>"
        following = create(server, "a", previous_response_id=answer.id, max_output_tokens=1)
        assert following.usage.input_tokens > answer.usage.input_tokens + 3
        with counting_server(server={"state_dir": str(folder)}) as second:
            refused = second.post("/v1/responses", {"model": second.model, "input": "a"})
            assert refused.status_code == 503 and refused.json()["error"]["code"] == "storage_failed"
            assert str(tmp_path) not in refused.text
        server.state.database.close()


def test_truncation(tiny: RunningServer) -> None:
    """As few of the oldest turns go as needed; what is left is the prompt of a conversation that never had them."""
    turns = [{"role": role, "content": f"{index}" * 60} for index in range(9) for role in ("user", "assistant")]
    items: Any = [*turns, {"role": "user", "content": "last"}]
    limit: Any = {"max_output_tokens": 100, "extra_body": {"ignore_eos": True}}
    with pytest.raises(openai.BadRequestError, match="the model takes"):
        create(tiny, items, **limit)
    cut = create(tiny, items, truncation="auto", **limit)
    assert cut.truncation == "auto" and cut.usage.output_tokens == 100
    counts = []
    for start in range(0, len(items), 2):
        try:
            counts.append(create(tiny, items[start:], **limit).usage.input_tokens)
        except openai.BadRequestError:
            continue
    assert len(counts) < 10 and cut.usage.input_tokens == counts[0] == max(counts)
    stored = tiny.openai.responses.input_items.list(cut.id, limit=100)
    assert len(stored.data) == len(items), "what the client sent is kept whole"
    with pytest.raises(openai.BadRequestError):
        create(tiny, "x" * 2000, truncation="auto")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"type": "web_search_call"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "function_call", "call_id": "c"}]}, "input[0].name"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 100000}, "max_output_tokens"),
        ({"input": "x" * 300}, "input"),
        ({"temperature": -1}, "temperature"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"truncation": "some"}, "truncation"),
        ({"background": True, "store": False}, "store"),
        ({"previous_response_id": "resp_none"}, "previous_response_id"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ],
)
def test_refused(chain: RunningServer, fields: dict[str, Any], param: str) -> None:
    response = chain.post("/v1/responses", {"model": chain.model, "input": "e", **fields})
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["type"]) == (400, param, "invalid_request_error"), error


def test_logprobs(tiny: RunningServer) -> None:
    include: Any = ["message.output_text.logprobs"]
    answer = create(tiny, "hello", include=include, top_logprobs=2, max_output_tokens=3)
    entries = answer.output[0].content[0].logprobs
    assert len(entries) == 3 and all(len(entry.top_logprobs) == 2 for entry in entries)


def test_input_tokens(tiny: RunningServer) -> None:
    counted = tiny.openai.responses.input_tokens.count(model=tiny.model, input="hello there")
    assert counted.input_tokens == create(tiny, "hello there", max_output_tokens=1).usage.input_tokens
