"""Clients that leave, come all at once or send enormous prompts: nothing is left behind, probes get answers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

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
        deadline = time.monotonic() + 60
        while not slow.client.num_open_requests:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    # The answers alone would take a minute.
    slow.wait_idle(50)
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


def resident(pid: int) -> int:
    """KiB of memory that a process has now."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))


def assert_settles(work: Callable[[], None], pids: list[int], kib: int) -> None:
    """``work`` done again and again leaves less than ``kib`` in some round: a leak grows in each, a cache does not."""
    grown: list[int] = []
    for _ in range(6):
        before = [resident(pid) for pid in pids]
        work()
        grown.append(max(resident(pid) - old for pid, old in zip(pids, before, strict=True)))
        if len(grown) > 1 and grown[-1] < kib:
            return
    raise AssertionError(f"memory grows in every round: {grown} KiB")


@pytest.mark.slow
def test_200_vanishing_streams_on_the_real_engine(tiny: RunningServer) -> None:
    """Hung up after the first token and later: no block is kept, and memory does not grow."""
    served = tiny.client.stats().num_blocks
    assert tiny.client.core_pid is not None

    def vanish() -> None:
        for index in range(100):
            body = {"model": tiny.model, "prompt": [index] * 50, "max_tokens": 400, "ignore_eos": True, "stream": True}
            content = json.dumps(body).encode()
            with socket.create_connection(("127.0.0.1", tiny.port), timeout=60) as connection:
                head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
                connection.sendall(head.encode() + content)
                for _ in range(1 + index % 5):
                    assert connection.recv(4096)
        tiny.wait_idle()
        stats = tiny.client.stats()
        assert (stats.num_blocks, stats.num_live_blocks, tiny.client.num_open_requests) == (served, 0, 0)

    # 10 KiB a stream would be a leak.
    assert_settles(vanish, [os.getpid(), tiny.client.core_pid], 10 * 100)
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


def test_b090_huge_prompts_are_refused_before_they_are_tokenized(
    slow: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a text's length alone tells costs no tokenizing, on the loop or beside it; a stream goes on meanwhile."""
    lengths: list[int] = []
    encode = slow.client.tokenizer.encode

    def watched(text: str, add_special_tokens: bool = True) -> list[int]:
        lengths.append(len(text))
        return encode(text, add_special_tokens)

    monkeypatch.setattr(slow.client.tokenizer, "encode", watched)
    num_lines = 0
    done = threading.Event()

    def stream() -> None:
        nonlocal num_lines
        body = {"model": "counting", "prompt": "a", "max_tokens": 4000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{slow.url}/v1/completions", json=body, timeout=60) as response:
            for _ in response.iter_lines():
                num_lines += 1
                if done.is_set():
                    return

    thread = threading.Thread(target=stream)
    thread.start()
    for size, status in ((5_000_000, 400), (30_000_000, 413)):
        body = {"model": "counting", "prompt": "word " * (size // 5)}
        response = slow.post("/v1/completions", body)
        assert response.status_code == status
    chat = {"model": "counting", "messages": [{"role": "user", "content": "word " * 1_000_000}]}
    assert slow.post("/v1/chat/completions", chat).status_code == 400
    before, deadline = num_lines, time.monotonic() + 60
    while num_lines <= before:
        assert time.monotonic() < deadline and thread.is_alive()
        time.sleep(0.01)
    done.set()
    thread.join(60)
    assert lengths and max(lengths) < 1000
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

    def reject() -> None:
        for path, body in bad * 100:
            assert counting.post(path, body).status_code in (400, 404)
        counting.wait_idle()

    # 4 KiB a request would be a leak.
    assert_settles(reject, [os.getpid()], 4 * 700)
    client = counting.client
    assert (len(client._streams), len(client._outputs)) == (0, 0)  # type: ignore[arg-type]
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

    async def load(port: int) -> tuple[list[bytes], int]:
        probes = 0
        done = asyncio.Event()

        async def probe() -> None:
            nonlocal probes
            while not done.is_set():
                assert (await raw_request(port, "GET /health")).startswith(b"HTTP/1.1 200 ")
                probes += 1
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
        return answers, probes

    with ServerProcess("SlowCore") as server:

        def descriptors() -> int:
            return len(os.listdir(f"/proc/{server.process.pid}/fd"))

        before = descriptors()
        idle = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(500)]
        answers, probes = asyncio.run(load(server.port))
        assert all(answer.startswith(b"HTTP/1.1 200 ") for answer in answers)
        assert all(b'"text":"bcd"' in answer for answer in answers[::2])
        assert all(b"[DONE]" in answer for answer in answers[1::2])
        assert probes > 0, "no probe was answered during the burst"
        for connection in idle:
            connection.close()
        deadline = time.monotonic() + 60
        while descriptors() > before:
            assert time.monotonic() < deadline, "connections are left open"
            time.sleep(0.02)


def test_full_server_says_when_to_come_back() -> None:
    with counting_server("SlowCore", server={"max_open_requests": 2}) as server:
        body = {"model": "counting", "prompt": "a", "max_tokens": 4000, "ignore_eos": True, "stream": True}
        content = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
        with contextlib.ExitStack() as stack:
            for _ in range(2):
                connection = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
                connection.sendall(head.encode() + content)
                assert connection.recv(12) == b"HTTP/1.1 200"
            refused = server.post("/v1/completions", body)
            assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
            assert server.http.get("/health").status_code == 200 and server.http.get("/metrics").status_code == 200
        server.wait_idle()
        assert server.post("/v1/completions", {**body, "max_tokens": 1}).status_code == 200


def test_slow_reader_holds_up_nobody(counting: RunningServer) -> None:
    """A client that does not read 5 MB of echoes: they wait for it, the others go on, and its leaving is noticed."""
    body = {"model": "counting", "prompt": ["a" * 4000] * 1200, "echo": True, "max_tokens": 1, "stream": True}
    content = json.dumps(body).encode()
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", counting.port))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
    connection.sendall(head.encode() + content)
    deadline = time.monotonic() + 100
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
    ticks: list[float] = []
    done = threading.Event()

    def tick() -> None:
        while not done.is_set():
            time.sleep(0.001)
            ticks.append(time.perf_counter())

    thread = threading.Thread(target=tick)
    thread.start()
    began = time.perf_counter()
    tokenizer.encode("word " * 200_000)
    ended = time.perf_counter()
    done.set()
    thread.join()
    # With the lock held the thread could tick once, when it is given back.
    assert len([moment for moment in ticks if began < moment < ended]) > 3, "tokenizing holds Python's lock"
