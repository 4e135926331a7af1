"""Start, drain and death of a whole server, a process for each test: statuses, last events, exit codes."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import httpx
import pytest
from counting_server import serve_counting
from http_server import ServerProcess
from twofold.errors import ConfigError


def finish_reasons(events: list[dict]) -> list[str]:
    return [
        choice["finish_reason"] for event in events for choice in event.get("choices", []) if choice["finish_reason"]
    ]


def post(server: ServerProcess, **fields: object) -> httpx.Response:
    body = {"model": "counting", "prompt": "a", "ignore_eos": True, **fields}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=30)


def test_b087_running_requests_finish() -> None:
    with ServerProcess("SlowCore", grace_seconds=120) as server:
        # Six seconds at least, so that they are still running when the signal and the refused request arrive.
        streams = [server.stream("abc"[index], 300) for index in range(3)]
        for stream in streams:
            stream.wait_for_events(10)
        server.signal()
        server.wait_for(503)
        refused = post(server, max_tokens=1)
        assert refused.status_code == 503 and refused.headers["retry-after"]
        assert refused.json()["error"]["code"] == "unavailable"
        for stream in streams:
            events = stream.finish()
            assert events[-1] == {"done": True} and finish_reasons(events) == ["length"]
        assert server.exit_code() == 0


def test_b087_grace_time_is_over() -> None:
    with ServerProcess("SlowCore", grace_seconds=0.3) as server:
        stream = server.stream("a", 1000)
        stream.wait_for_events(5)
        server.signal(signal.SIGINT)
        events = stream.finish()
        assert stream.error is None, "an error event is wanted, not a cut socket"
        assert "shutting down" in events[-1]["error"]["message"] and not finish_reasons(events)
        assert server.exit_code() == 0


def test_b087_second_signal_ends_at_once() -> None:
    with ServerProcess("SlowCore", grace_seconds=60) as server:
        stream = server.stream("a", 3000)
        stream.wait_for_events(5)
        server.signal()
        server.wait_for(503)
        server.signal()
        assert server.exit_code(50) == 128 + signal.SIGTERM
        stream.finish()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_b087_signal_while_loading(number: int) -> None:
    with ServerProcess("SlowStartCore", wait=False) as server:
        health = httpx.get(f"{server.url}/health")
        assert health.status_code == 503 and health.json()["error"]["code"] == "loading"
        assert post(server).status_code == 503 and httpx.get(f"{server.url}/v1/models").status_code == 503
        assert "twofold_engine_up 0.0" in httpx.get(f"{server.url}/metrics").text
        server.signal(number)
        assert server.exit_code() == 0


@pytest.mark.parametrize("core", ["RaisingCore", "DyingCore"])
def test_b086_dead_core(core: str) -> None:
    """Five steps serve at most five tokens; then every open request ends with an error, and so does the process."""
    with ServerProcess(core) as server:
        streams = [server.stream("a", 100) for _ in range(3)]
        try:
            response = post(server, max_tokens=100)
            assert response.status_code == 503 and response.json()["error"]["code"] == "engine_dead"
        except httpx.TransportError:
            pass  # it came so late that the server had gone
        for stream in streams:
            events = stream.finish()
            if stream.error is None:
                assert events[-1]["error"]["code"] == "engine_dead" and not finish_reasons(events)
        assert any(stream.error is None for stream in streams)
        assert server.exit_code() == 1


@pytest.mark.parametrize("core", ["MisconfiguredCore", "BrokenCore", "KilledAtStartCore"])
def test_failed_start_ends_the_process(core: str) -> None:
    with pytest.raises(AssertionError, match="ended with 1"), ServerProcess(core) as server:
        server.wait_for(200)


def test_port_in_use() -> None:
    with ServerProcess("CountingCore") as server, pytest.raises(ConfigError, match=f"port {server.port}"):
        serve_counting("CountingCore", {"port": server.port})


@pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs and their masks"
)
def test_the_server_stays_off_the_cores_of_the_computing_threads() -> None:
    cpus = sorted(os.sched_getaffinity(0))
    with ServerProcess("TiedCore") as server:
        assert post(server, max_tokens=2).status_code == 200
        own = [os.sched_getaffinity(thread) for thread in threads_of(server.process.pid)]
        assert len(own) > 1 and all(mask == {cpus[-1]} for mask in own)
        cores = [child for child in children_of(server.process.pid) if os.sched_getaffinity(child) != set(cpus)]
        assert [os.sched_getaffinity(core) for core in cores] == [{cpus[0]}]
        server.signal()
        assert server.exit_code() == 0


def threads_of(process: int) -> list[int]:
    return [int(thread.name) for thread in Path(f"/proc/{process}/task").iterdir()]


def children_of(process: int) -> list[int]:
    return [int(pid) for thread in threads_of(process) for pid in _children(process, thread)]


def _children(process: int, thread: int) -> list[str]:
    return Path(f"/proc/{process}/task/{thread}/children").read_text().split()
