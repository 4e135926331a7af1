"""/v1/files and /v1/batches through OpenAI's client; a batch goes on after a restart."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from http_server import RunningServer, ServerProcess, counting_server


@pytest.fixture(scope="module")
def slow() -> Iterator[RunningServer]:
    with counting_server("SlowCore") as server:
        yield server


def completion(name: str, prompt: str = "a", **fields: Any) -> dict[str, Any]:
    body = {"model": "counting", "prompt": prompt, "max_tokens": 2, "ignore_eos": True, **fields}
    return {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body}


def upload(client: openai.OpenAI, lines: list[Any]) -> str:
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    return client.files.create(file=("in.jsonl", text.encode()), purpose="batch").id


def run(client: openai.OpenAI, lines: list[Any], endpoint: Any = "/v1/completions") -> Any:
    return client.batches.create(input_file_id=upload(client, lines), endpoint=endpoint, completion_window="24h")


def finished(client: openai.OpenAI, batch_id: str) -> Any:
    deadline = time.monotonic() + 200
    while (batch := client.batches.retrieve(batch_id)).status not in ("completed", "failed", "cancelled"):
        assert time.monotonic() < deadline, batch
        time.sleep(0.02)
    return batch


def lines_of(client: openai.OpenAI, file_id: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in client.files.content(file_id).text.splitlines()]


def test_files(counting: RunningServer) -> None:
    client = counting.openai
    made = client.files.create(file=("data.jsonl", b"one\ntwo"), purpose="batch")
    assert (made.bytes, made.filename, made.purpose, made.object) == (7, "data.jsonl", "batch", "file")
    assert client.files.retrieve(made.id) == made and client.files.content(made.id).read() == b"one\ntwo"
    other = client.files.create(file=("b", b"x"), purpose="user_data")
    assert [file.id for file in client.files.list(limit=1)][:2] == [other.id, made.id], "newest first, over pages"
    assert made.id not in [file.id for file in client.files.list(purpose="user_data")]
    assert client.files.delete(made.id).deleted
    for call in (client.files.retrieve, client.files.delete, client.files.content):
        with pytest.raises(openai.NotFoundError):
            call(made.id)


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"json": {}}, "file"),
        ({"data": {"purpose": "batch"}}, "file"),
        ({"files": {"file": ("a", b"x")}}, "purpose"),
        ({"files": {"file": ("a", b"x")}, "data": {"purpose": "fine-tune"}}, "purpose"),
        ({"content": b"--x", "headers": {"content-type": "multipart/form-data"}}, "file"),
        ({"content": b"none", "headers": {"content-type": "multipart/form-data; boundary=x"}}, "file"),
    ],
)
def test_wrong_uploads(counting: RunningServer, options: dict[str, Any], param: str) -> None:
    response = counting.http.post("/v1/files", **options)
    assert response.status_code == 400 and response.json()["error"]["param"] == param, response.text


def test_a_batch(counting: RunningServer) -> None:
    client = counting.openai
    requests = [completion(f"r{index}", chr(97 + index % 20)) for index in range(40)]
    requests[7] = completion("wrong", temperature=-1)
    requests[9] = completion("other", model="none")
    batch = run(client, [*requests, ""])
    assert (batch.object, batch.endpoint) == ("batch", "/v1/completions")
    done = finished(client, batch.id)
    assert done.status == "completed" and done.completed_at and done.errors is None
    counts = done.request_counts
    assert (counts.total, counts.completed, counts.failed) == (40, 38, 2)
    answers = lines_of(client, done.output_file_id)
    assert [line["custom_id"] for line in answers] == [f"r{i}" for i in range(40) if i not in (7, 9)]
    for line in answers:
        start = 97 + int(line["custom_id"][1:]) % 20
        assert line["response"]["status_code"] == 200 and line["response"]["request_id"] and line["error"] is None
        assert line["response"]["body"]["choices"][0]["text"] == chr(start + 1) + chr(start + 2)
    failures = lines_of(client, done.error_file_id)
    assert [(line["custom_id"], line["response"]["status_code"]) for line in failures] == [
        ("wrong", 400),
        ("other", 404),
    ]
    assert failures[0]["response"]["body"]["error"]["param"] == "temperature"
    assert batch.id in [item.id for item in client.batches.list()]
    counting.wait_idle()


def test_other_endpoints(counting: RunningServer) -> None:
    body = {"model": "counting", "input": "a", "max_output_tokens": 1}
    line = {"custom_id": "r", "method": "POST", "url": "/v1/responses", "body": body}
    done = finished(counting.openai, run(counting.openai, [line], "/v1/responses").id)
    answer = lines_of(counting.openai, done.output_file_id)[0]["response"]["body"]
    assert counting.openai.responses.retrieve(answer["id"]).status == answer["status"]


@pytest.mark.parametrize(
    ("lines", "code", "number"),
    [
        ([completion("a"), "{"], "invalid_json_line", 2),
        ([completion("a"), completion("a")], "invalid_request", 2),
        ([{**completion("a"), "url": "/v1/embeddings"}], "invalid_request", 1),
        ([{**completion("a"), "method": "GET"}], "invalid_json_line", 1),
        ([completion("a", stream=True)], "invalid_request", 1),
        ([""], "empty_file", None),
    ],
)
def test_wrong_files_run_nothing(counting: RunningServer, lines: list[Any], code: str, number: int | None) -> None:
    done = finished(counting.openai, run(counting.openai, lines).id)
    assert done.status == "failed" and done.output_file_id is None
    assert [(error.code, error.line) for error in done.errors.data] == [(code, number)]


def test_refused(counting: RunningServer) -> None:
    file_id = upload(counting.openai, [completion("a")])
    with pytest.raises(openai.BadRequestError):
        run(counting.openai, [completion("a")], "/v1/moderations")
    counting.openai.files.delete(file_id)
    with pytest.raises(openai.NotFoundError):
        counting.openai.batches.create(input_file_id=file_id, endpoint="/v1/completions", completion_window="24h")
    with pytest.raises(openai.NotFoundError):
        counting.openai.batches.retrieve("batch_none")


def test_cancel(slow: RunningServer) -> None:
    client = slow.openai
    batch = run(client, [completion("short", max_tokens=1), completion("long", max_tokens=3000)])
    deadline = time.monotonic() + 100
    while client.batches.retrieve(batch.id).request_counts.completed < 1:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert client.batches.cancel(batch.id).status == "cancelled"
    done = client.batches.retrieve(batch.id)
    assert done.status == "cancelled" and done.cancelled_at
    assert [line["custom_id"] for line in lines_of(client, done.output_file_id)] == ["short"]
    slow.wait_idle()
    assert client.batches.cancel(batch.id).status == "cancelled"


def test_goes_on_after_a_kill(tmp_path: Path) -> None:
    state = str(tmp_path / "state")
    requests = [completion(f"r{index}", max_tokens=15) for index in range(160)]  # three seconds at least
    with ServerProcess("SlowCore", state_dir=state) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        batch = run(client, requests)
        deadline = time.monotonic() + 100
        while not (counts := client.batches.retrieve(batch.id).request_counts).completed:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        server.process.kill()
        server.process.wait()
        assert counts.completed < 160
    with ServerProcess("SlowCore", state_dir=state) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        done = finished(client, batch.id)
        assert done.status == "completed" and done.request_counts.completed == 160
        answers = lines_of(client, done.output_file_id)
        assert [line["custom_id"] for line in answers] == [f"r{index}" for index in range(160)]
        assert {line["response"]["body"]["choices"][0]["text"] for line in answers} == {"bcdefghijklmnop"}
