"""Twofold beside other engines on a CPU: workloads W1 to W4, the same token ids, cores and threads, one peer at a time.

    python benchmarks/cpu_peers.py [MODEL] [--gguf FILE ...] [--peers a,b] [--workloads w1,w3c32] [--output FILE]

MODEL is a folder of a 16- or 32-bit checkpoint in Hugging Face layout, each FILE the same model in GGUF; or a model
of the catalogue in GGUF, which is fetched and written as a float32 folder, too. Peers are found by

    LLAMA_SERVER     llama.cpp's llama-server (default: the one on PATH); serves every GGUF file; LLAMA_VERSION names it
    OPENVINO_PYTHON  a Python with openvino-genai, and
    OPENVINO_MODELS  a folder with one folder for each exported model; OPENVINO_PRECISION and OPENVINO_KV_CACHE (f32)
    TRANSFORMERS_PYTHON  a Python with transformers and torch (default: this one)

Twofold serves every GGUF file, too, and the folder in float32 and with its weights in 8 bits; +int8 is
`--cpu-activations int8`. Twofold and llama.cpp stream over HTTP to a client on the same cores; the others run in a
process without one. With --output, what FILE has of other peers and workloads stays: a table can be measured in pieces.
--table prints it.
Keep the machine otherwise idle.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from cpu_peer_processes import Peer, Running, find_peers
from cpu_peer_table import describe, table
from machine_speed import machine_speed
from peers import convert_gguf
from workloads import NAMES, WorkloadMaker

_MODEL = "smollm2-135m-instruct"


def main() -> None:
    """Measure what was asked for, keep it, print the table."""
    args = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a peer is stopped, too
    kept: dict[str, Any] = {"machine": {}, "peers": {}}
    if args.output and Path(args.output).exists():
        kept = json.loads(Path(args.output).read_text())
    if not args.table:
        if not Path(args.model).is_dir():
            args.model, args.gguf = from_catalogue(args.model, args.gguf)
        measure_all(args, kept)
    print(table(kept))


def parse_arguments() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=_MODEL, help=f"folder, or a name (default: {_MODEL})")
    parser.add_argument(
        "--gguf", nargs="*", default=[], metavar="FILE", help="the same model in GGUF; rows bear its name"
    )
    parser.add_argument(
        "--peers", help="comma list of rows, `none` for the machine alone; all that are found otherwise"
    )
    parser.add_argument("--workloads", default=",".join(NAMES), help="comma list of " + ", ".join(NAMES))
    parser.add_argument("--repetitions", type=int, default=1, help="of each workload, with prompts of their own")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="number of the first repetition")
    parser.add_argument("--threads", type=int, default=2, help="threads, and cores, for each peer")
    parser.add_argument("--scale", type=int, default=1, help="divide all lengths and counts, for a smoke test")
    parser.add_argument("--no-machine", action="store_true", help="do not measure bandwidth and products")
    parser.add_argument("--output", metavar="FILE", help="keep every figure as JSON")
    parser.add_argument("--table", action="store_true", help="measure nothing, print the table of --output")
    parser.add_argument("--log", default=os.devnull, metavar="FILE", help="what the peers print")
    parser.add_argument("--list", action="store_true", help="print the rows that can be measured, and stop")
    return parser.parse_args()


def from_catalogue(name: str, gguf: list[str]) -> tuple[str, list[str]]:
    """A float32 folder and the GGUF files of a model in the catalogue; both lie in the cache afterwards."""
    from twofold.engine.sources import pull
    from twofold.env import cache_dir

    file = Path(pull(name).path)
    folder = cache_dir() / "benchmarks" / name
    convert_gguf(file, folder)
    return str(folder), [str(file), *gguf]


def measure_all(args: argparse.Namespace, kept: dict[str, Any]) -> None:
    """Fill ``kept``, and write it after each peer."""
    found = {peer.name: peer for peer in find_peers(args.model, args.gguf, args.threads)}
    if args.list:
        print("\n".join(found))
        sys.exit()
    wanted = list(found) if args.peers is None else [name for name in args.peers.split(",") if name != "none"]
    if missing := [name for name in wanted if name not in found]:
        sys.exit(f"not installed: {', '.join(missing)}; there are {', '.join(found)}")
    if not args.no_machine:
        kept["machine"].setdefault("speeds", []).append(machine_speed(args.threads))
    for name in wanted:
        measure(args, found[name], kept["peers"].setdefault(name, {"runs": {}}))
        if args.output:
            Path(args.output).write_text(json.dumps(kept, indent=1) + "\n")


def measure(args: argparse.Namespace, peer: Peer, row: dict[str, Any]) -> None:
    """One launch of one peer."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(args.model) / "tokenizer.json"))
    maker = WorkloadMaker(lambda text: tokenizer.encode(text, add_special_tokens=False).ids, args.scale)
    cores = set(sorted(os.sched_getaffinity(0))[: args.threads])
    running = Running(peer, cores, maker.first_request(), args.log)
    try:
        running.run(maker.warm_up())
        for repetition in range(args.first, args.first + args.repetitions):
            for name in args.workloads.split(","):
                workload = maker.make(name, repetition)
                start = time.perf_counter()
                traces = running.run(workload)
                figures = describe(workload, traces, time.perf_counter() - start)
                row["runs"].setdefault(name, {})[str(repetition)] = figures
                print(f"{peer.name} {name} {figures['seconds']:.2f} s", file=sys.stderr, flush=True)
        row["version"] = peer.version
        row.setdefault("start_s", []).append(running.start_s)
        row["peak_bytes"] = max(running.peak_bytes(), row.get("peak_bytes", 0))
    finally:
        running.stop()


if __name__ == "__main__":
    main()
