"""Clients that leave, come all at once or send enormous prompts: nothing is left behind, probes get answers."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator

import httpx
import pytest
from http_server import RunningServer, ServerProcess, counting_server
from twofold.engine.client import AsyncEngineClient


@pytest.fixture(scope="module")
def slow() -> Iterator[RunningServer]:
    with counting_server("SlowCore") as server:
        yield server


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fields", [{"n": 1}, {"n": 3}, {"prompt": ["a", "b"], "n": 2}])
def test_client_gone_frees_everything(slow: RunningServer, stream: bool, fields: dict) -> None:
    body = {"model": "counting", "prompt": "a", "max_tokens": 3000, "ignore_eos": True, "stream": stream, **fields}
    content = json.dumps(body).encode()
    with socket.create_connection(("127.0.0.1", slow.port)) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
        connection.sendall(head.encode() + content)
        if stream:
            assert connection.recv(4096).startswith(b"HTTP/1.1 200 ")
        time.sleep(0.1)
        assert slow.client.num_open_requests > 0
    slow.wait_idle(3)
    assert slow.complete("a", max_tokens=1)["choices"][0]["text"] == "b"


def test_vanishing_clients_on_the_real_engine(tiny: RunningServer) -> None:
    """Hung up in the middle of prefill or decoding: the engine's blocks come back."""
    for index in range(20):
        body = {
            "model": tiny.model,
            "prompt": [index] * 100,
            "max_tokens": 300,
            "ignore_eos": True,
            "stream": index % 2 == 0,
        }
        request = httpx.Request("POST", f"{tiny.url}/v1/completions", json=body)
        with socket.create_connection(("127.0.0.1", tiny.port)) as connection:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(request.content)}\r\n\r\n"
            connection.sendall(head.encode() + request.content)
            time.sleep(0.002 * index)
    tiny.wait_idle()
    assert tiny.complete("abc", max_tokens=2, ignore_eos=True)["usage"]["completion_tokens"] == 2


def test_b094_error_in_the_middle_of_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """FailingSampleCore fails requests whose id begins with "bad" at their fifth token."""
    make_request = AsyncEngineClient.make_request

    async def make_bad(
        self: AsyncEngineClient, prompt: str, *args: object, request_id: str, **options: object
    ) -> object:
        return await make_request(
            self, prompt, *args, request_id=("bad" if prompt == "B" else "") + request_id, **options
        )

    monkeypatch.setattr(AsyncEngineClient, "make_request", make_bad)
    with counting_server("FailingSampleCore") as server:
        results: dict[str, list[dict]] = {}

        def read(prompt: str) -> None:
            results[prompt] = server.events("/v1/completions", {"prompt": prompt, "max_tokens": 8})

        threads = [threading.Thread(target=read, args=(prompt,)) for prompt in ("B", "a")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        *chunks, last = results["B"]
        assert last["error"]["code"] == "generation_failed" and "bad row" in last["error"]["message"]
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "CDEF"
        assert not any(chunk["choices"][0]["finish_reason"] for chunk in chunks)
        assert "".join(chunk["choices"][0]["text"] for chunk in results["a"][:-1]) == "bcdefghi"
        assert results["a"][-1] == {"done": True}
        whole = server.post("/v1/completions", {"model": "counting", "prompt": "B", "max_tokens": 8})
        assert whole.status_code == 500 and whole.json()["error"]["code"] == "generation_failed"
        with pytest.raises(Exception, match="bad row"):
            for _ in server.openai.completions.create(model="counting", prompt="B", max_tokens=8, stream=True):
                pass
        server.wait_idle()


def test_b090_huge_prompts_do_not_block(slow: RunningServer) -> None:
    gaps: list[float] = []
    latencies: list[float] = []
    done = threading.Event()

    def probe() -> None:
        while not done.is_set():
            began = time.monotonic()
            assert slow.http.get("/health").status_code == 200
            latencies.append(time.monotonic() - began)
            time.sleep(0.02)

    def stream() -> None:
        body = {"model": "counting", "prompt": "a", "max_tokens": 3000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{slow.url}/v1/completions", json=body, timeout=30) as response:
            last = time.monotonic()
            for _ in response.iter_lines():
                gaps.append(time.monotonic() - last)
                last = time.monotonic()
                if done.is_set():
                    return

    threads = [threading.Thread(target=work) for work in (probe, stream)]
    for thread in threads:
        thread.start()
    for size, status in ((5_000_000, 400), (30_000_000, 413)):
        body = {"model": "counting", "prompt": "word " * (size // 5)}
        response = slow.post("/v1/completions", body)
        assert response.status_code == status
    chat = {"model": "counting", "messages": [{"role": "user", "content": "word " * 1_000_000}]}
    assert slow.post("/v1/chat/completions", chat).status_code == 400
    done.set()
    for thread in threads:
        thread.join(10)
    assert max(latencies) < 0.5 and max(gaps) < 1.0
    slow.wait_idle()


def test_b093_rejections_leave_nothing(counting: RunningServer) -> None:
    bad = [
        ("/v1/completions", {"model": "counting", "prompt": "a" * 5000}),
        ("/v1/completions", {"model": "counting", "prompt": "a", "temperature": "x"}),
        ("/v1/completions", {"model": "other", "prompt": "a"}),
        ("/v1/completions", {"model": "counting", "prompt": "a", "logit_bias": {"999": 1}}),
        ("/v1/completions", {"model": "counting", "prompt": ["a", [1]]}),
        ("/v1/completions", {"model": "counting", "prompt": [1, 255], "n": 2}),
        ("/v1/chat/completions", {"model": "counting", "messages": []}),
    ]
    for _ in range(20):
        for path, body in bad:
            assert counting.post(path, body).status_code in (400, 404)
    counting.wait_idle()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(150):
        for path, body in bad:
            counting.post(path, body)
    counting.wait_idle()
    client = counting.client
    assert (len(client._streams), len(client._outputs)) == (0, 0)  # type: ignore[arg-type]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000
    assert counting.complete("a", max_tokens=2)["choices"][0]["text"] == "bc"


def test_rejected_by_the_core(counting: RunningServer) -> None:
    """CountingCore refuses prompts that end with 255, as a real one refuses what only it can know."""
    for stream in (False, True):
        response = counting.post("/v1/completions", {"model": "counting", "prompt": [1, 255], "stream": stream})
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "context_length_exceeded"
    counting.wait_idle()


async def raw_request(port: int, head: str, content: bytes = b"") -> bytes:
    """The whole answer to one request on a connection of its own; far cheaper than a full client."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"{head} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(content)}\r\n\r\n".encode())
    writer.write(content)
    try:
        return await reader.read(-1)
    finally:
        writer.close()


def test_b095_burst() -> None:
    """1,000 requests at once beside 500 idle connections: all are answered, and so is every probe."""

    async def load(port: int) -> tuple[list[bytes], list[float]]:
        latencies: list[float] = []
        done = asyncio.Event()

        async def probe() -> None:
            while not done.is_set():
                began = time.monotonic()
                assert (await raw_request(port, "GET /health")).startswith(b"HTTP/1.1 200 ")
                latencies.append(time.monotonic() - began)
                await asyncio.sleep(0.02)

        bodies = [
            json.dumps({"model": "counting", "prompt": "a", "max_tokens": 3, "stream": stream}).encode()
            for stream in (False, True)
        ]
        probing = asyncio.ensure_future(probe())
        requests = (raw_request(port, "POST /v1/completions", bodies[index % 2]) for index in range(1000))
        answers = await asyncio.gather(*requests)
        done.set()
        await probing
        return answers, latencies

    with ServerProcess("SlowCore") as server:

        def descriptors() -> int:
            return len(os.listdir(f"/proc/{server.process.pid}/fd"))

        before = descriptors()
        idle = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(500)]
        answers, latencies = asyncio.run(load(server.port))
        assert all(answer.startswith(b"HTTP/1.1 200 ") for answer in answers)
        assert all(b'"text":"bcd"' in answer for answer in answers[::2])
        assert all(b"[DONE]" in answer for answer in answers[1::2])
        assert max(latencies) < 1.0
        for connection in idle:
            connection.close()
        deadline = time.monotonic() + 5
        while descriptors() > before:
            assert time.monotonic() < deadline, "connections are left open"
            time.sleep(0.02)


def test_full_server_says_when_to_come_back() -> None:
    with counting_server("SlowCore", server={"max_open_requests": 2}) as server:
        bodies = [{"model": "counting", "prompt": "a", "max_tokens": 100, "ignore_eos": True} for _ in range(2)]
        threads = [threading.Thread(target=server.post, args=("/v1/completions", body)) for body in bodies]
        for thread in threads:
            thread.start()
        while server.state.num_open < 2:
            time.sleep(0.01)
        refused = server.post("/v1/completions", bodies[0])
        assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
        assert server.http.get("/health").status_code == 200 and server.http.get("/metrics").status_code == 200
        for thread in threads:
            thread.join(20)
        assert server.post("/v1/completions", {**bodies[0], "max_tokens": 1}).status_code == 200


def test_slow_reader_holds_up_nobody(counting: RunningServer) -> None:
    """A client that does not read 5 MB of echoes: they wait for it, the others go on, and its leaving is noticed."""
    body = {"model": "counting", "prompt": ["a" * 4000] * 1200, "echo": True, "max_tokens": 1, "stream": True}
    content = json.dumps(body).encode()
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", counting.port))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
    connection.sendall(head.encode() + content)
    deadline = time.monotonic() + 20
    while counting.client.num_open_requests or not counting.state.num_open:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert counting.complete("a", max_tokens=5)["choices"][0]["text"] == "bcdef"
    time.sleep(0.1)
    assert counting.state.num_open == 1, "the answer cannot have been sent"
    connection.close()
    counting.wait_idle()


def test_b090_a_real_tokenizer_works_beside_the_loop(tiny: RunningServer) -> None:
    """Tokenizing a long text leaves Python's lock to other threads, so that the loop goes on."""
    tokenizer = tiny.client.tokenizer
    gaps = []
    done = threading.Event()

    def tick() -> None:
        while not done.is_set():
            last = time.perf_counter()
            time.sleep(0.001)
            gaps.append(time.perf_counter() - last)

    thread = threading.Thread(target=tick)
    thread.start()
    began = time.perf_counter()
    tokenizer.encode("word " * 100_000)
    spent = time.perf_counter() - began
    done.set()
    thread.join()
    assert max(gaps) < max(0.2, 0.6 * spent), "tokenizing holds Python's lock"
