"""Responses in the background that are streamed: clients leave, come back where they were, and find the same events."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from chain_model import build_chain_model
from http_server import RunningServer, counting_server, running_server

FOREVER: Any = {"ignore_eos": True}


@pytest.fixture(scope="module")
def slow() -> Iterator[RunningServer]:
    """Counts up from the end of the template with a pause after each token."""
    with counting_server("SlowCore") as server:
        yield server


def begin(server: RunningServer, text: str = "a", **fields: Any) -> Any:
    options = {"max_output_tokens": 30, "extra_body": FOREVER, **fields}
    return server.openai.responses.create(model=server.model, input=text, background=True, stream=True, **options)


def text_of(events: list[Any]) -> str:
    return "".join(event.delta for event in events if event.type == "response.output_text.delta")


def test_stream(slow: RunningServer) -> None:
    events = list(begin(slow, max_output_tokens=5))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:3]] == ["response.created", "response.queued", "response.in_progress"]
    assert [event.response.status for event in events[:3]] == ["queued", "queued", "in_progress"]
    assert events[-1].type == "response.incomplete" and events[-1].response.output_text == text_of(events) == "<=>?@"
    assert slow.openai.responses.retrieve(events[0].response.id).output_text == "<=>?@", "stored before it is told"


@pytest.mark.parametrize("wait", [False, True])
def test_a_client_comes_back(slow: RunningServer, wait: bool) -> None:
    """While the response is at work, and when it has ended."""
    seen = []
    with begin(slow) as stream:
        for event in stream:
            seen.append(event)
            if len(text_of(seen)) == 3:
                break
    response_id = seen[0].response.id
    if wait:
        slow.wait_idle()
        assert slow.openai.responses.retrieve(response_id).status == "incomplete", "the work went on"
    rest = list(slow.openai.responses.retrieve(response_id, stream=True, starting_after=seen[-1].sequence_number))
    together = [*seen, *rest]
    assert [event.sequence_number for event in together] == list(range(len(together)))
    assert together[-1].response.output_text == text_of(together) and len(text_of(together)) == 30
    again = list(slow.openai.responses.retrieve(response_id, stream=True))
    assert [event.to_dict() for event in again] == [event.to_dict() for event in together]
    assert not list(slow.openai.responses.retrieve(response_id, stream=True, starting_after=10**6))


def test_cancelled(slow: RunningServer) -> None:
    """The stream says so in its last event, with the text so far, and keeps its events."""
    seen: list[Any] = []
    with begin(slow, max_output_tokens=4000) as stream:
        for event in stream:
            seen.append(event)
            if len(seen) > 1 and len(text_of(seen)) == 2 and text_of(seen[:-1]) != text_of(seen):
                assert slow.openai.responses.cancel(seen[0].response.id).status == "cancelled"
    # The client has no class for this event, and leaves its response as it came.
    last: Any = seen[-1].to_dict()
    assert last["type"] == "response.cancelled" and last["response"]["status"] == "cancelled"
    shown = last["response"]["output"][0]["content"][0]["text"]
    assert shown == text_of(seen) and len(shown) >= 2
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    stored = slow.openai.responses.retrieve(seen[0].response.id)
    assert stored.status == "cancelled" and stored.output_text == text_of(seen)
    again = list(slow.openai.responses.retrieve(stored.id, stream=True))
    assert [event.to_dict() for event in again] == [event.to_dict() for event in seen]
    assert slow.openai.responses.cancel(stored.id).status == "cancelled", "once more changes nothing"
    slow.wait_idle()


def test_deleted(slow: RunningServer) -> None:
    with begin(slow, max_output_tokens=4000) as stream:
        response_id = next(iter(stream)).response.id
        slow.openai.responses.delete(response_id)
        with pytest.raises(openai.NotFoundError):
            slow.openai.responses.retrieve(response_id, stream=True)
        assert not [event for event in stream if event.type == "response.completed"], "its stream ends"
    slow.wait_idle()


def test_failed() -> None:
    with counting_server("RaisingCore") as server:
        events = list(begin(server, max_output_tokens=50))
        assert events[-1].type == "response.failed" and events[-1].response.error.code == "server_error"


def test_no_events_of_others(slow: RunningServer) -> None:
    plain = slow.openai.responses.create(model=slow.model, input="a", max_output_tokens=1)
    for query, param in (({"stream": "true"}, "stream"), ({"stream": "true", "starting_after": "x"}, "starting_after")):
        response = slow.http.get(f"/v1/responses/{plain.id}", params=query)
        assert response.status_code == 400 and response.json()["error"]["param"] == param
    with pytest.raises(openai.BadRequestError, match="include"):
        slow.openai.responses.retrieve(plain.id, include=["everything"])  # type: ignore[list-item]
    with pytest.raises(openai.BadRequestError, match=r"no response has web_search_call\.results"):
        slow.openai.responses.retrieve(plain.id, include=["web_search_call.results"])
    assert slow.openai.responses.retrieve(plain.id, include=["reasoning.encrypted_content"]).id == plain.id


def test_several_turns_over_restarts(tmp_path: Path) -> None:
    """Every turn in a server of its own; the last one's prompt is that of the whole conversation at once."""
    state = {"state_dir": str(tmp_path)}
    previous, events, items = None, [], []
    for letter in "abc":
        with counting_server(server=state) as server:
            stream = begin(server, letter, max_output_tokens=3, previous_response_id=previous)
            events = list(stream)
            answer = events[-1].response
            previous = answer.id
            items += [{"role": "user", "content": letter}, {"role": "assistant", "content": answer.output_text}]
            whole = server.openai.responses.create(
                model=server.model, input=items[:-1], max_output_tokens=3, extra_body=FOREVER
            )
            assert whole.usage.input_tokens == answer.usage.input_tokens
            server.state.database.close()
    with counting_server(server=state) as server:
        kept = list(server.openai.responses.retrieve(previous, stream=True))
        assert [event.to_dict() for event in kept] == [event.to_dict() for event in events]
        asked = server.openai.responses.input_items.list(previous).data
        assert [item.content[0].text for item in asked] == ["c"]
        server.openai.responses.delete(previous)

        def count(connection: Any) -> int:
            return connection.execute("SELECT COUNT(*) FROM response_events").fetchone()[0]

        assert server.state.database._thread.submit(server.state.database._transaction, count).result(10) == 2
        server.state.database.close()


def test_thoughts_that_the_client_keeps(tmp_path: Path) -> None:
    """With ``store`` false a client sends the item back: what it holds reaches the template as thoughts."""
    template = (
        "{% for m in messages %}{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content }}"
        "{% endfor %}{# <think> </think> #}"
    )
    build_chain_model(tmp_path, [["C", b"<think>x", b"y", b"</think>", b"be", b"cause"]], chat_template=template)
    with running_server(tmp_path, num_threads=1) as server:
        include: Any = ["reasoning.encrypted_content"]
        first = server.openai.responses.create(model=server.model, input="C", store=False, include=include)
        assert first.output[0].type == "reasoning" and first.output[0].content[0].text == "xy"
        sealed = first.output[0].encrypted_content
        assert sealed and "xy" not in sealed
        items: Any = [{"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": sealed}]
        items += [{"role": "assistant", "content": "because"}, {"role": "user", "content": "C"}]
        counted = server.openai.responses.input_tokens.count(model=server.model, input=items)
        bare = server.openai.responses.input_tokens.count(model=server.model, input=items[1:])
        assert counted.input_tokens == bare.input_tokens + len("(xy)")
        plain = server.openai.responses.create(model=server.model, input="C")
        assert plain.output[0].encrypted_content is None
