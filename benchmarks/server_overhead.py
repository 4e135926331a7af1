"""What the HTTP server costs over a core that replays: CPU time per token, time to first token, many streams.

    python benchmarks/server_overhead.py [--model FOLDER] [--streams 1000] [--rate 50] [--pin] [--profile]

The core computes nothing: every step it gives each open sample its next token. The same requests go to the bare
AsyncEngineClient in this process, and over HTTP to a server in a process of its own; clients are a third process, so
that the server's CPU time is its own. Of many streams, what is measured is the time in which all of them run: from the
first event of the last to the end of the first. ``--pin`` gives the server one processor and the core and the clients
another. ``--model`` takes that model's tokenizer and template instead of bytes.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import multiprocessing
import os
import pstats
import socket
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from replay_core import FACTORY, PROCESSOR, ByteTokenizer
from stream_load import StreamResult, read_streams
from twofold.engine.client import AsyncEngineClient
from twofold.engine.config import EngineConfig
from twofold.engine.sampling_params import SamplingParams
from twofold.server.config import ServerConfig
from twofold.server.run import run_server

PROMPT = (
    "The harbour was quiet before dawn; 17 boats lay along the wall, and their owners, wrapped in coats, "
    "talked about the weather, the price of fuel and the naïve young man who had bought the old lighthouse. "
)
# Seconds between two looks of the clients at their streams, which leaves more of a processor to the core.
_REST = 0.05
CHAT = "/v1/chat/completions"


def text_side(model: str | None) -> Any:
    """The tokenizer of ``model``, or one of bytes."""
    if model is None:
        return ByteTokenizer()
    from twofold.engine.text_side import find_model, load_text_side

    config = EngineConfig(model=model)
    tokenizer = load_text_side(find_model(config), config)[0]
    tokenizer.prepare_chat()
    return tokenizer


def serve(port: int, pace: int, model: str | None, profile: bool, processors: list[int] | None) -> None:
    """Entry of the server's process; of two ``processors`` it keeps to the first and its core to the second."""
    if processors is not None:
        os.sched_setaffinity(0, processors[:1])
        os.environ[PROCESSOR] = str(processors[1])
    client = {"core_factory": FACTORY, "tokenizer": text_side(model)}
    config = EngineConfig(model="replay", seed=pace)
    run = partial(run_server, config, ServerConfig(port=port), client_options=client)
    if not profile:
        sys.exit(run())
    profiler = cProfile.Profile()
    profiler.runcall(run)
    pstats.Stats(profiler).sort_stats("tottime").print_stats(35)


def cpu_seconds(pid: int) -> float:
    """User and system time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def bodies(count: int, num_tokens: int) -> list[dict[str, object]]:
    messages = [{"role": "user", "content": PROMPT}]
    return [{"model": "replay", "messages": messages, "max_tokens": num_tokens, "stream": True}] * count


def load(port: int, count: int, num_tokens: int, queue: Any, processors: list[int] | None) -> None:
    """Entry of the clients' process: ``count`` streams at once, or ``-count`` one after the other."""
    if processors is not None:
        os.sched_setaffinity(0, processors[1:])
    began = time.perf_counter()
    results: list[StreamResult] = []

    def mark(events: int) -> None:
        queue.put((events, time.perf_counter()))

    if count > 0:
        results = read_streams(port, CHAT, bodies(count, num_tokens), b'"content":"', mark, rest=_REST)
    for batch in [bodies(1, num_tokens)] * -count:
        results += read_streams(port, CHAT, batch, b'"content":"')
    queue.put((results, time.perf_counter() - began))


def measure_http(args: argparse.Namespace, pace: int, streams: int, num_tokens: int) -> dict[str, float]:
    """Start a server, load it, and give its figures."""
    context = multiprocessing.get_context("spawn")
    port = free_port()
    processors = sorted(os.sched_getaffinity(0))[:2] if args.pin else None
    server = context.Process(target=serve, args=(port, pace, args.model, args.profile, processors))
    server.start()
    assert server.pid is not None
    wait_ready(port, server)
    queue = context.Queue()
    before = cpu_seconds(server.pid)
    clients = context.Process(target=load, args=(port, streams, num_tokens, queue, processors))
    clients.start()
    if streams > 0:
        # Opening and ending cost as well, but the question is what a token costs in streams that run.
        num_before, began = queue.get()
        opening, before = cpu_seconds(server.pid) - before, cpu_seconds(server.pid)
        print(f"    opening a stream: {opening / streams * 1e6:.0f} us of processor time with its first tokens")
        num_after, ended = queue.get()
        used, seconds, events = cpu_seconds(server.pid) - before, ended - began, num_after - num_before
        results = queue.get()[0]
        # The clients count events; of the tokens between the marks they saw the same share as of all.
        share = sum(result.events for result in results) / (streams * num_tokens)
        tokens = int(events / share)
    else:
        results, seconds = queue.get()
        used, events = cpu_seconds(server.pid) - before, sum(result.events for result in results)
        tokens = -streams * num_tokens
    server.terminate()
    server.join()
    clients.join()
    assert all(result.complete for result in results), "a stream ended early"
    return figures([result.first for result in results], seconds, used, tokens, events)


def measure_bare(args: argparse.Namespace, pace: int, streams: int, num_tokens: int) -> dict[str, float]:
    """The same load on the client alone, in this process."""

    async def stream(client: AsyncEngineClient) -> tuple[float, int]:
        began = time.perf_counter()
        first, deltas = 0.0, 0
        async for _ in client.generate(PROMPT, SamplingParams(max_tokens=num_tokens, seed=0)):
            first = first or time.perf_counter() - began
            deltas += 1
        return first, deltas

    async def run() -> dict[str, float]:
        config = EngineConfig(model="replay", seed=pace)
        client = await AsyncEngineClient.start(config, core_factory=FACTORY, tokenizer=text_side(args.model))
        before, began = cpu_seconds(os.getpid()), time.perf_counter()
        if streams < 0:
            results = [await stream(client) for _ in range(-streams)]
        else:
            results = await asyncio.gather(*(stream(client) for _ in range(streams)))
        seconds, used = time.perf_counter() - began, cpu_seconds(os.getpid()) - before
        await client.shutdown()
        firsts, deltas = [first for first, _ in results], sum(deltas for _, deltas in results)
        return figures(firsts, seconds, used, abs(streams) * num_tokens, deltas)

    return asyncio.run(run())


def figures(firsts: list[float], seconds: float, used: float, tokens: int, events: int) -> dict[str, float]:
    return {
        "tokens/s": tokens / seconds,
        "TTFT p50 ms": statistics.median(firsts) * 1e3,
        "CPU us/token": used / tokens * 1e6,
        "CPU share": used / seconds,
        "events/token": events / tokens,
    }


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def wait_ready(port: int, server: Any) -> None:
    while server.is_alive():
        try:
            with socket.create_connection(("127.0.0.1", port)) as connection:
                connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                if b" 200 " in connection.recv(100):
                    return
        except OSError:
            pass
        time.sleep(0.05)
    sys.exit("the server did not start")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or GGUF file whose tokenizer is used")
    parser.add_argument("--streams", type=int, default=1000, help="streams at once in the last measurement")
    parser.add_argument("--rate", type=float, default=50.0, help="tokens/s of each of them")
    parser.add_argument("--tokens", type=int, default=300, help="tokens of each of them")
    parser.add_argument("--only", choices=["first", "32", "many"], help="one of the three measurements")
    parser.add_argument("--pin", action="store_true", help="one processor for the server, one for core and clients")
    parser.add_argument("--profile", action="store_true", help="print where the server's time goes")
    args = parser.parse_args()
    cases = {
        "first": (100, -200, 2),
        "32": (10_000, 32, 300),
        "many": (int(1e6 / args.rate), args.streams, args.tokens),
    }
    for pace, streams, num_tokens in [cases[args.only]] if args.only else cases.values():
        how = "one after the other" if streams < 0 else "at once"
        print(f"{abs(streams)} streams {how}, {num_tokens} tokens each at {1e6 / pace:.0f} tokens/s")
        for name, measure in (("bare client", measure_bare), ("over HTTP", measure_http)):
            result = measure(args, pace, streams, num_tokens)
            print(f"  {name:12}" + "  ".join(f"{key} {value:.2f}" for key, value in result.items()), flush=True)


if __name__ == "__main__":
    main()
