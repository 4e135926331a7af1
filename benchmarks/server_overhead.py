"""What the HTTP server costs over a core that replays: CPU time per token, time to first token, many streams.

    python benchmarks/server_overhead.py [--streams 1000] [--rate 50]

The core computes nothing: every STEP it gives each open sample its next token. The same requests go to the bare
AsyncEngineClient in this process, and over HTTP to a server in a process of its own; clients are a third process, so
that the server's CPU time is its own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from twofold.engine.client import AsyncEngineClient
from twofold.engine.config import EngineConfig
from twofold.engine.messages import AbortRequest, EngineInfo, EngineRequest, EngineStats, TokenOutput
from twofold.engine.sampling_params import SamplingParams
from twofold.server.config import ServerConfig
from twofold.server.run import run_server

PROMPT = "x" * 200
FACTORY = "server_overhead:ReplayCore"


class ByteTokenizer:
    """Ids are bytes."""

    vocab_size = 256
    special_ids: frozenset[int] = frozenset()
    max_token_length = 1

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return bytes(ids).decode(errors="replace")

    def render_chat(self, messages: list[dict[str, Any]], **options: Any) -> str:
        return "".join(message["content"] for message in messages)


class ReplayCore:
    """Gives each open sample one token every ``seed`` microseconds (EngineConfig.seed carries the pace)."""

    def __init__(self, config: EngineConfig) -> None:
        self._step = config.seed / 1e6
        self._next = 0.0
        self._left: dict[str, int] = {}

    def info(self) -> EngineInfo:
        return EngineInfo(
            model_name="replay",
            vocab_size=256,
            max_model_len=100_000,
            block_size=16,
            num_blocks=1,
            device="cpu",
            dtype="float32",
        )

    def add_request(self, request: EngineRequest) -> None:
        self._left[request.request_id] = request.params.max_tokens or 1

    def abort(self, request: AbortRequest) -> None:
        self._left.pop(request.request_id, None)

    def has_work(self) -> bool:
        return bool(self._left)

    def step(self) -> list[TokenOutput]:
        now = time.monotonic()
        if self._next > now:
            time.sleep(self._next - now)
        self._next = max(self._next, now) + self._step
        outputs = []
        for request_id in list(self._left):
            self._left[request_id] -= 1
            last = self._left[request_id] == 0
            if last:
                del self._left[request_id]
            token = 97 + self._left.get(request_id, 0) % 26
            outputs.append(
                TokenOutput(request_id=request_id, token_ids=[token], finish_reason="length" if last else None)
            )
        return outputs

    def stats(self) -> EngineStats:
        return EngineStats(num_running=len(self._left))

    def shutdown(self) -> None:
        pass


def serve(port: int, pace: int) -> None:
    """Entry of the server's process."""
    client = {"core_factory": FACTORY, "tokenizer": ByteTokenizer()}
    config = EngineConfig(model="replay", seed=pace)
    sys.exit(run_server(config, ServerConfig(port=port), client_options=client))


def cpu_seconds(pid: int) -> float:
    """User and system time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def http_stream(port: int, num_tokens: int) -> tuple[float, int]:
    """(seconds to the first token, events) of one streamed chat completion."""
    body = {
        "model": "replay",
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": num_tokens,
        "stream": True,
    }
    content = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    began = time.perf_counter()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    writer.write(head.encode() + content)
    first, events = 0.0, 0
    while data := await reader.read(1 << 16):
        first = first or (time.perf_counter() - began if b'"content":"' in data else 0.0)
        events += data.count(b"data: ")
    writer.close()
    return first, events


async def bare_stream(client: AsyncEngineClient, num_tokens: int) -> tuple[float, int]:
    """The same request without HTTP."""
    began = time.perf_counter()
    first, deltas = 0.0, 0
    params = SamplingParams(max_tokens=num_tokens, seed=0)
    async for _ in client.generate(PROMPT, params):
        first = first or time.perf_counter() - began
        deltas += 1
    return first, deltas


async def many(stream: Any, count: int) -> tuple[list[float], int, float]:
    """(first-token times, events, seconds) of ``count`` streams at once; of ``-count`` streams one after the other."""
    began = time.perf_counter()
    if count < 0:
        results = [await stream() for _ in range(-count)]
        return [first for first, _ in results], sum(events for _, events in results), time.perf_counter() - began
    results = await asyncio.gather(*(stream() for _ in range(count)))
    return [first for first, _ in results], sum(events for _, events in results), time.perf_counter() - began


def load(port: int, streams: int, num_tokens: int, queue: Any) -> None:
    """Entry of the clients' process."""
    queue.put(asyncio.run(many(lambda: http_stream(port, num_tokens), streams)))


def measure_http(port: int, pace: int, streams: int, num_tokens: int) -> dict[str, float]:
    """Start a server, load it, and give its figures."""
    context = multiprocessing.get_context("spawn")
    server = context.Process(target=serve, args=(port, pace))
    server.start()
    assert server.pid is not None
    asyncio.run(wait_ready(port))
    queue = context.Queue()
    before = cpu_seconds(server.pid)
    clients = context.Process(target=load, args=(port, streams, num_tokens, queue))
    clients.start()
    firsts, events, seconds = queue.get()
    used = cpu_seconds(server.pid) - before
    server.terminate()
    server.join()
    clients.join()
    tokens = abs(streams) * num_tokens
    return figures(firsts, seconds, used, tokens, events)


def measure_bare(pace: int, streams: int, num_tokens: int) -> dict[str, float]:
    """The same load on the client alone, in this process."""

    async def run() -> dict[str, float]:
        config = EngineConfig(model="replay", seed=pace)
        client = await AsyncEngineClient.start(config, core_factory=FACTORY, tokenizer=ByteTokenizer())
        before = cpu_seconds(os.getpid())
        firsts, events, seconds = await many(lambda: bare_stream(client, num_tokens), streams)
        used = cpu_seconds(os.getpid()) - before
        await client.shutdown()
        return figures(firsts, seconds, used, abs(streams) * num_tokens, events)

    return asyncio.run(run())


def figures(firsts: list[float], seconds: float, used: float, tokens: int, events: int) -> dict[str, float]:
    return {
        "tokens/s": tokens / seconds,
        "TTFT p50 ms": statistics.median(firsts) * 1e3,
        "CPU us/token": used / tokens * 1e6,
        "CPU share": used / seconds,
        "events/token": events / tokens,
    }


async def wait_ready(port: int) -> None:
    while True:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            answer = await reader.read()
            writer.close()
            if b" 200 " in answer[:20]:
                return
        except OSError:
            pass
        await asyncio.sleep(0.05)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=1000, help="streams at once in the last measurement")
    parser.add_argument("--rate", type=float, default=50.0, help="tokens/s of each of them")
    parser.add_argument("--port", type=int, default=8765, help="port of the server under test")
    args = parser.parse_args()
    cases = [(100, -200, 2), (10_000, 32, 300), (int(1e6 / args.rate), args.streams, 300)]
    for pace, streams, num_tokens in cases:
        how = "one after the other" if streams < 0 else "at once"
        print(f"{abs(streams)} streams {how}, {num_tokens} tokens each at {1e6 / pace:.0f} tokens/s")
        for name, result in (
            ("bare client", measure_bare(pace, streams, num_tokens)),
            ("over HTTP", measure_http(args.port, pace, streams, num_tokens)),
        ):
            print(f"  {name:12}" + "  ".join(f"{key} {value:.2f}" for key, value in result.items()), flush=True)


if __name__ == "__main__":
    main()
