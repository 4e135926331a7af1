"""A decode step on the CPU with graphs and without, and where its time goes: ``benchmarks/decode_graphs.py MODEL``.

Two engines share one model and take turns round by round, so that a busy moment strikes both. Greedy requests of short
prompts; each row has the tenth percentile and the median of the steps by the clock, and the processor time of all
threads per step. Then the kernels of the recorded step, each by the fifth best of its replays, and the bound: the bytes
that the step reads of weights, and how long a plain read of as many bytes in large pages takes in the same run.
"""

from __future__ import annotations

import argparse
import collections
import time

import numpy as np
import torch
from twofold.engine.config import EngineConfig
from twofold.engine.core.engine_core import EngineCore
from twofold.engine.core.loading import load_parts
from twofold.engine.messages import EngineRequest
from twofold.engine.sampling_params import SamplingParams
from twofold.kernels.cpu import weight_memory
from twofold.kernels.cpu.tape import Tape

REPLAYS, RANK = 40, 4


def main() -> None:
    """Print rows per batch size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--threads", type=int)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=15, help="of each engine in a round")
    parser.add_argument("--cpu-activations", default="exact")
    args = parser.parse_args()
    options = {"model": args.model, "device": "cpu", "num_threads": args.threads, "kv_cache_bytes": 1 << 28}
    options["cpu_activations"] = args.cpu_activations
    parts = load_parts(EngineConfig(**options))
    cores = {
        name: EngineCore.from_parts(
            EngineConfig(**options, enforce_eager=name == "eager"), parts.model, parts.platform, parts.kernels
        )
        for name in ("eager", "graphs")
    }
    for batch in args.batch:
        compare(cores, batch, args.rounds, args.steps)
        show_tape(cores["graphs"], batch)
        for core in cores.values():
            while core.has_work():
                core.step()
    read = sum(int(row["bytes"]) for row in parts.kernels.report() if row.get("op") == "linear" and "bytes" in row)
    if read:
        seconds = read_seconds(read, args.threads or parts.platform.spec.num_cores)
        speed = read / seconds / 1e9
        print(f"weights: {read / 1e6:.1f} MB a step; a plain read takes {seconds * 1e3:.2f} ms, {speed:.1f} GB/s")


def compare(cores: dict[str, EngineCore], batch: int, rounds: int, steps: int) -> None:
    """Print the steps' times of both engines at a batch size."""
    for core in cores.values():
        for index in range(batch):
            prompt = [(3 * place + 17 * index) % 4096 + 10 for place in range(8)]
            params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=rounds * steps + 4)
            core.add_request(EngineRequest(request_id=f"{batch}-{index}", prompt_token_ids=prompt, params=params))
        for _ in range(3):
            core.step()
    times: dict[str, list[float]] = {name: [] for name in cores}
    processor = dict.fromkeys(cores, 0.0)
    for _ in range(rounds):
        for name, core in cores.items():
            start = time.process_time()
            for _ in range(steps):
                begin = time.perf_counter()
                core.step()
                times[name].append((time.perf_counter() - begin) * 1e3)
            processor[name] += time.process_time() - start
    for name, values in times.items():
        low, middle = np.percentile(values, [10, 50])
        each = processor[name] / len(values) * 1e3
        print(f"batch {batch:3d} {name:6s} p10 {low:7.2f} ms, median {middle:7.2f} ms, processor {each:7.2f} ms")


def show_tape(core: EngineCore, batch: int) -> None:
    """Print what each kernel of the recorded step takes."""
    graphs = core._graphs
    assert graphs is not None
    tape = graphs._graphs[graphs._recorder.rows_for(batch)]
    assert isinstance(tape, Tape)
    times = np.sort(np.array([tape.timed_replay() for _ in range(REPLAYS)]), axis=0)[RANK] / 1e6
    total: dict[str, float] = collections.defaultdict(float)
    for name, value in zip(tape.names, times, strict=True):
        total[name] += float(value)
    counts = collections.Counter(tape.names)
    for name, value in sorted(total.items(), key=lambda row: -row[1]):
        print(f"    {name:28s} {counts[name]:4d} calls {value:8.3f} ms")


def read_seconds(num_bytes: int, threads: int) -> float:
    """The best of some reads of so many bytes by torch's threads."""
    area = weight_memory.empty((num_bytes // 4,), torch.float32).fill_(1.0)
    torch.set_num_threads(threads)
    best = float("inf")
    for _ in range(20):
        start = time.perf_counter()
        area.sum()
        best = min(best, time.perf_counter() - start)
    return best


if __name__ == "__main__":
    main()
