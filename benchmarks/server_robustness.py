"""Attack a server and see what is left: statuses, memory, descriptors, open requests, and the next request.

    python benchmarks/server_robustness.py [--scale 1.0] [--only NAME]

The server is a process of its own over a core that replays tokens. Each attack names the statuses that it accepts;
afterwards a request must be answered, nothing may be open, and memory and descriptors must be where they were.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

from hostile_clients import (
    COMPLETIONS,
    SECRET_KEY,
    ask,
    close_all,
    completion,
    get,
    open_idle,
    post,
    slow_readers,
    until,
    vanish,
)
from replay_core import FACTORY, ByteTokenizer
from server_overhead import free_port

SECRET_PROMPT = "the-prompt-nobody-may-log"
BODY_SECONDS = 3.0
MAX_CONNECTIONS = 8000
# A process keeps some memory of a first attack for the next one; a leak grows with each.
RSS_SLACK = 80 << 20


class Victim:
    """The server under attack."""

    def __init__(self, **options: Any) -> None:
        self.port = free_port()
        self.log = tempfile.TemporaryFile()  # noqa: SIM115
        given = {
            "port": self.port,
            "api_keys": [SECRET_KEY],
            "body_seconds": BODY_SECONDS,
            "access_log": True,
            **options,
        }
        command = [sys.executable, __file__, "--serve", json.dumps(given)]
        environment = {**os.environ, "TWOFOLD_LOG_LEVEL": "DEBUG"}
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log, env=environment)

    async def wait_ready(self) -> None:
        async def ready() -> bool:
            assert self.process.poll() is None, self.log_text()
            try:
                return (await ask(self.port, get("/health")))[0] == 200
            except OSError:
                return False

        assert await until(ready, 120), "the server did not start"

    def rss(self) -> int:
        fields = Path(f"/proc/{self.process.pid}/statm").read_text().split()
        return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    async def gauge(self, name: str) -> float:
        _, answer = await ask(self.port, get("/metrics"))
        lines = [line for line in answer.decode().splitlines() if line.startswith(f"twofold_{name} ")]
        return float(lines[0].split()[1])

    async def is_idle(self) -> bool:
        names = ("num_open_http_requests", "num_requests_running", "num_requests_waiting", "kv_cache_live_blocks")
        return not any([await self.gauge(name) for name in names])

    def log_text(self) -> str:
        self.log.seek(0)
        return self.log.read().decode(errors="replace")

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(60)


def serve(options: dict[str, Any]) -> int:
    """Entry of the server's process."""
    from twofold.engine.config import EngineConfig
    from twofold.server.config import ServerConfig
    from twofold.server.run import run_server

    options["api_keys"] = tuple(options["api_keys"])
    client = {"core_factory": FACTORY, "tokenizer": ByteTokenizer()}
    return run_server(EngineConfig(model="replay", seed=2000), ServerConfig(**options), client_options=client)


def chunked(total: int) -> Iterator[bytes]:
    """A body without a length, of ``total`` bytes."""
    yield post(b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    piece = b"10000\r\n" + b" " * 65536 + b"\r\n"
    for _ in range(total >> 16):
        yield piece


def endless_head(total: int) -> Iterator[bytes]:
    yield b"GET /health HTTP/1.1\r\nHost: x\r\nX-Long: "
    for _ in range(total >> 16):
        yield b"a" * 65536


def drops(data: bytes) -> Iterator[bytes]:
    return (data[index : index + 1] for index in range(len(data)))


async def statuses(victim: Victim, requests: list[Any], pause: float = 0.0) -> set[int]:
    answers = await asyncio.gather(*(ask(victim.port, request, pause) for request in requests))
    for _, answer in answers:
        assert b"Traceback" not in answer and b"root:" not in answer
    return {status for status, _ in answers}


async def malformed(victim: Victim, scale: float) -> None:
    good = json.dumps(completion()).encode()
    deep = 100_000
    wrong = [b"{:", b"", b"null", b"[]", good[:-1], good + b"}", b"[" * deep, b"[" * deep + b"]" * deep]
    wrong += [good[:-1] + b', "x": ' + b'{"a":' * deep + b"1" + b"}" * deep + b"}", b"\xef\xbb\xbf" + good]
    wrong += [good.replace(b"hello", raw) for raw in (b"a\xff", b"a\xc3", b"\\ud800")]
    wrong += [good.decode().encode("utf-16"), '{"model": "replay", "prompt": "你好"}'.encode("gbk")]
    assert await statuses(victim, [post(body) for body in wrong]) == {400}
    assert await statuses(victim, [post(good, "Content-Encoding: gzip\r\n")]) == {415}
    assert await statuses(victim, [b"\x16\x03\x01\x02\x00\x01\x00", b"NONSENSE\r\n\r\n"]) == {400}


async def huge_bodies(victim: Victim, scale: float) -> None:
    size, before = 100 << 20, victim.rss()
    seen: list[int] = []

    async def watch() -> None:
        while True:
            seen.append(victim.rss())
            await asyncio.sleep(0.02)

    watching = asyncio.ensure_future(watch())
    body = b" " * (1 << 20)
    claimed = (post(body, length=size) if index == 0 else body for index in range(size >> 20))
    assert await statuses(victim, [claimed, chunked(size)]) == {413}
    watching.cancel()
    assert max(seen) - before < 64 << 20, f"memory grew by {max(seen) - before} bytes"


async def big_heads(victim: Victim, scale: float) -> None:
    many = get("/health", "".join(f"X-{index}: a\r\n" for index in range(200)))
    long_header = get("/health", f"X-Long: {'a' * 100_000}\r\n")
    long_url = get("/health?q=" + "a" * 100_000)
    before = victim.rss()
    found = [await statuses(victim, [request]) for request in (many, long_header, long_url, endless_head(100 << 20))]
    assert found == [{431}] * 4, found
    assert victim.rss() - before < RSS_SLACK


async def slow_heads(victim: Victim, scale: float) -> None:
    request = get("/health", "X-Slow: aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\r\n")
    assert await statuses(victim, [drops(request) for _ in range(int(200 * scale) or 1)], 0.3) == {408}


async def slow_bodies(victim: Victim, scale: float) -> None:
    good = json.dumps(completion()).encode()
    head, _, body = post(good).partition(b"\r\n\r\n")

    def pieces() -> Iterator[bytes]:
        yield head + b"\r\n\r\n"
        yield from drops(body)

    assert await statuses(victim, [pieces() for _ in range(int(200 * scale) or 1)], 0.3) == {408}


async def readers_that_read_nothing(victim: Victim, scale: float) -> None:
    count, before = int(100 * scale) or 1, victim.rss()
    writers = await slow_readers(victim.port, count)
    for _ in range(5):
        assert await statuses(victim, [post(json.dumps(completion()).encode())]) == {200}
        await asyncio.sleep(1.0 * min(1.0, scale))
    grown = victim.rss() - before
    close_all(writers)
    assert grown < RSS_SLACK + count * (1 << 20), f"{count} slow readers took {grown} bytes"


async def idle_connections(victim: Victim, scale: float) -> None:
    """As many as fit, all kept; then more than that: the oldest make room."""
    count, before = int(5000 * scale), victim.rss()
    writers = await open_idle(victim.port, count)
    assert await statuses(victim, [get("/health"), post(json.dumps(completion()).encode())]) == {200}
    grown = victim.rss() - before
    assert grown < count * (64 << 10) + RSS_SLACK, f"{count} idle connections took {grown} bytes"
    writers += await open_idle(victim.port, int(MAX_CONNECTIONS * scale) + 100 - count)
    assert await statuses(victim, [get("/health"), post(json.dumps(completion()).encode())]) == {200}
    close_all(writers)


async def vanishing(victim: Victim, scale: float) -> None:
    await vanish(victim.port, int(1000 * scale) or 1)


async def many_at_once(victim: Victim, scale: float) -> None:
    bodies = [json.dumps(completion(stream=index % 2 == 0)).encode() for index in range(int(2000 * scale))]
    found = await statuses(victim, [post(body) for body in bodies])
    assert found <= {200, 503}, found


async def paths_of_the_host(victim: Victim, scale: float) -> None:
    names = [
        "../../../../etc/passwd",
        "/etc/passwd",
        "file:///etc/passwd",
        "replay/../../etc/passwd",
        "~/.ssh/id_rsa",
        "\0",
    ]
    bodies = [post(json.dumps(completion(model=name)).encode()) for name in names]
    encoded = ["..%2f..%2fetc%2fpasswd", "%2e%2e/%2e%2e/etc/passwd", "%2fetc%2fpasswd", "..\\..\\etc", "%00"]
    reads = [
        get(f"/v1/{place}/{name}{end}")
        for name in encoded
        for place, end in (("models", ""), ("files", ""), ("files", "/content"), ("batches", ""), ("responses", ""))
    ]
    assert await statuses(victim, [*bodies, *reads]) <= {400, 404}
    batch = {"input_file_id": "../../etc/passwd", "endpoint": COMPLETIONS, "completion_window": "24h"}
    assert await statuses(victim, [post(json.dumps(batch).encode(), path="/v1/batches")]) <= {400, 404}


async def secrets(victim: Victim, scale: float) -> None:
    """Keys and prompts, right and wrong ones, in every place where a client might put them."""
    body = json.dumps(completion(prompt=SECRET_PROMPT, user=SECRET_PROMPT)).encode()
    requests = [post(body), post(body[:-1]), post(body, "X-Api-Key: sk-robustness-other\r\n")]
    requests += [post(json.dumps(completion(model=SECRET_KEY)).encode()), get(f"/v1/models?key={SECRET_KEY}")]
    await statuses(victim, requests)
    text = victim.log_text()
    assert len(text) > 100, "the log is empty"
    assert "sk-robustness" not in text and SECRET_PROMPT not in text


Attack = Callable[[Victim, float], Coroutine[Any, Any, None]]
ATTACKS: list[Attack] = [
    malformed,
    huge_bodies,
    big_heads,
    slow_heads,
    slow_bodies,
    readers_that_read_nothing,
    idle_connections,
    vanishing,
    many_at_once,
    paths_of_the_host,
    secrets,
]


async def run(attacks: list[Attack], scale: float) -> dict[str, str]:
    """What is wrong after each attack; empty where all is well."""
    victim = Victim(max_connections=int(MAX_CONNECTIONS * scale) + 50)
    failures: dict[str, str] = {}
    try:
        await victim.wait_ready()
        await asyncio.wait_for(malformed(victim, scale), 120)
        descriptors, rss = victim.descriptors(), victim.rss()
        for attack in attacks:
            began = time.perf_counter()
            problem = await _outcome(attack, victim, scale, descriptors)
            if problem:
                failures[attack.__name__] = problem
            grown = (victim.rss() - rss) / (1 << 20)
            seconds = time.perf_counter() - began
            print(f"{attack.__name__:26} {problem or 'ok':10} {seconds:6.1f} s, memory {grown:+.1f} MiB", flush=True)
    finally:
        code = victim.stop()
    if code:
        failures["exit"] = f"the server ended with {code}"
    return failures


async def _outcome(attack: Attack, victim: Victim, scale: float, descriptors: int) -> str:
    async def quiet() -> bool:
        return await victim.is_idle() and victim.descriptors() <= descriptors

    try:
        await asyncio.wait_for(attack(victim, scale), 300)
        assert await until(quiet), f"left open: {victim.descriptors() - descriptors} descriptors, or requests"
        good = post(json.dumps(completion()).encode())
        assert await statuses(victim, [good]) == {200}, "the next request was not served"
    except (AssertionError, asyncio.TimeoutError) as error:
        return f"FAILED: {error!r}"[:300]
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=1.0, help="a smaller attack with fewer clients")
    parser.add_argument("--only", action="append", choices=[attack.__name__ for attack in ATTACKS])
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        sys.exit(serve(json.loads(args.serve)))
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    chosen = [attack for attack in ATTACKS if args.only is None or attack.__name__ in args.only]
    failures = asyncio.run(run(chosen, args.scale))
    sys.exit(f"{len(failures)} failed: {failures}" if failures else 0)


if __name__ == "__main__":
    main()
