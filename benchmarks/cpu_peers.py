"""Twofold beside other engines on a CPU: workloads W1 to W4, the same token ids, cores and threads, one peer at a time.

    python benchmarks/cpu_peers.py [MODEL] [--gguf FILE ...] [--peers a,b] [--workloads w1,w3c32] [--output FILE]

MODEL is a folder of a 16- or 32-bit checkpoint in Hugging Face layout, each FILE the same model in GGUF; or a model
of the catalogue in GGUF, which is fetched and written as a float32 folder, too. Peers are found by

    LLAMA_SERVER     llama.cpp's llama-server (default: the one on PATH); serves every GGUF file; LLAMA_VERSION names
                     it, and LLAMA_ARGS are more options for it
    OPENVINO_PYTHON  a Python with openvino-genai, and
    OPENVINO_MODELS  a folder with one folder for each exported model (openvino_models.py writes it)
    VLLM_PYTHON      a Python with vLLM's CPU build; VLLM_PRELOAD is its LD_PRELOAD, which its guide wants to name
                     libtcmalloc_minimal and its libiomp5
    TRANSFORMERS_PYTHON  a Python with transformers and torch (default: this one)

Twofold serves every GGUF file below 16 bits, and the folder in float32, bfloat16 and with its weights in 8 bits; +int8
and +bf16 are `--cpu-activations` of that name, +kv16 is `--kv-cache-dtype bfloat16`. Its row bf16 is the folder of
--narrow, served as it is stored. OpenVINO computes in float32, and in bfloat16 in rows with +bf16. vLLM compiles the
model, for minutes at its first start; in rows with +eager it does not. Twofold, llama.cpp and vLLM stream over HTTP to
a client on the same cores; the others run in a process without one.

Peers take turns, `--launches` times, each with prompts of its own. A run beside which others took more than 5 % of the
cores is repeated, and the quietest kept. With --output every figure is kept; what FILE has already is not measured
again, so that a table can be measured in pieces and a stopped run continued. --table prints it, with the targets met.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from cpu_peer_processes import PeerError, Running
from cpu_peer_rows import Peer, find_peers, layer_parameters, weight_bits
from cpu_peer_table import BUSY, describe, table
from cpu_peer_targets import alone, targets
from other_work import OtherWork
from workloads import NAMES, WorkloadMaker

_MODEL = "smollm2-135m-instruct"
# Prompts of a repeated run are those of this many repetitions further on.
_AGAIN = 1000
Figures = dict[str, float]


def main() -> None:
    """Measure what was asked for, keep it, print the tables; status 1 when a peer failed."""
    args = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a peer is stopped, too
    kept: dict[str, Any] = {"machine": {}, "peers": {}}
    if args.output and Path(args.output).exists():
        kept |= json.loads(Path(args.output).read_text())
    failed = False
    if not args.table:
        if not Path(args.model).is_dir():
            args.model, args.gguf = from_catalogue(args.model, args.gguf)
        failed = Runner(args, kept).run()
    print(table(kept), "", targets(kept), "", alone(kept), sep="\n")
    sys.exit(failed)


def parse_arguments() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=_MODEL, help=f"folder, or a name (default: {_MODEL})")
    parser.add_argument(
        "--gguf", nargs="*", default=[], metavar="FILE", help="the same model in GGUF; rows bear its name"
    )
    parser.add_argument("--narrow", metavar="FOLDER", help="the same model stored in 16 bits, for Twofold")
    parser.add_argument(
        "--peers", help="comma list of rows, `none` for the machine alone; all that are found otherwise"
    )
    parser.add_argument("--workloads", default=",".join(NAMES), help="comma list of " + ", ".join(NAMES))
    parser.add_argument("--launches", type=int, default=1, help="of each peer, in turns")
    parser.add_argument("--repetitions", type=int, default=1, help="of each workload in a launch")
    parser.add_argument("--tries", type=int, default=3, help="runs of a workload until one is undisturbed")
    parser.add_argument("--budget-minutes", type=float, help="begin nothing that would take longer")
    parser.add_argument("--threads", type=int, default=2, help="threads, and cores, for each peer")
    parser.add_argument("--scale", type=int, default=1, help="divide all lengths and counts, for a smoke test")
    parser.add_argument("--shorter", type=int, default=1, help="divide the lengths of w3 and w4, for a large model")
    parser.add_argument("--no-machine", action="store_true", help="do not measure bandwidth and products")
    parser.add_argument("--output", metavar="FILE", help="keep every figure as JSON")
    parser.add_argument("--table", action="store_true", help="measure nothing, print the tables of --output")
    parser.add_argument("--log", default=os.devnull, metavar="FILE", help="what the peers print")
    parser.add_argument("--list", action="store_true", help="print the rows that can be measured, and stop")
    return parser.parse_args()


def from_catalogue(name: str, gguf: list[str]) -> tuple[str, list[str]]:
    """A float32 folder and the GGUF files of a model in the catalogue; both lie in the cache afterwards."""
    from peers import convert_gguf
    from twofold.engine.sources import pull
    from twofold.env import cache_dir

    file = Path(pull(name).path)
    folder = cache_dir() / "benchmarks" / name
    convert_gguf(file, folder)
    return str(folder), [str(file), *gguf]


def units(workloads: list[str]) -> list[tuple[str, ...]]:
    """Workloads in the order of measuring; the warm one needs the cold one just before."""
    if unknown := set(workloads) - set(NAMES):
        raise SystemExit(f"unknown workload {', '.join(unknown)}; there are {', '.join(NAMES)}")
    found: list[tuple[str, ...]] = [(name,) for name in workloads if name not in ("w4", "w4warm")]
    if "w4warm" in workloads:
        return [*found, ("w4", "w4warm")]
    return [*found, ("w4",)] if "w4" in workloads else found


class Runner:
    """Fills ``kept`` and writes it after every run."""

    def __init__(self, args: argparse.Namespace, kept: dict[str, Any]) -> None:
        from tokenizers import Tokenizer

        self._args, self._kept = args, kept
        self._units = units(args.workloads.split(","))
        self._cores = set(sorted(os.sched_getaffinity(0))[: args.threads])
        self._end = time.monotonic() + 60 * (args.budget_minutes or 1e6)
        self._peers = self._wanted()
        tokenizer = Tokenizer.from_file(str(Path(args.model) / "tokenizer.json"))
        encode = lambda text: tokenizer.encode(text, add_special_tokens=False).ids  # noqa: E731
        self._maker = WorkloadMaker(encode, args.scale, args.shorter)

    def _wanted(self) -> list[Peer]:
        args = self._args
        found = {peer.name: peer for peer in find_peers(args.model, args.gguf, args.threads, args.narrow)}
        if args.list:
            print("\n".join(found))
            sys.exit()
        names = list(found) if args.peers is None else [name for name in args.peers.split(",") if name != "none"]
        if missing := [name for name in names if name not in found]:
            sys.exit(f"not installed: {', '.join(missing)}; there are {', '.join(found)}")
        return [found[name] for name in names]

    def run(self) -> bool:
        """Whether a peer failed."""
        self._check_settings()
        if not self._args.no_machine:
            self._measure_machine()
        failed: set[str] = set()
        for launch in range(self._args.launches):
            for peer in self._peers:
                if peer.name not in failed and not self._launch(peer, launch):
                    failed.add(peer.name)
        return bool(failed)

    def _check_settings(self) -> None:
        """Figures of other lengths or threads do not belong into one table."""
        args = self._args
        asked = {"model": Path(args.model).name, "threads": args.threads, "scale": args.scale, "shorter": args.shorter}
        if (had := self._kept.setdefault("settings", asked)) != asked:
            sys.exit(f"{args.output} has figures of {had}, not {asked}; choose another --output")
        if (Path(args.model) / "config.json").exists():
            self._kept["layer_parameters"] = layer_parameters(args.model)

    def _measure_machine(self) -> None:
        from machine_speed import machine_speed

        os.sched_setaffinity(0, self._cores)
        tries: list[Figures] = []
        for _ in range(self._args.tries):
            with OtherWork(self._cores, lambda: [os.getpid()]) as others:
                figures = machine_speed(self._args.threads)
            tries.append(figures | {"busy": others.share})
            if others.share <= BUSY:
                break
        self._kept["machine"].setdefault("speeds", []).append(min(tries, key=lambda figures: figures["busy"]))
        self._save()

    def _launch(self, peer: Peer, launch: int) -> bool:
        """Measure what is not kept yet of one launch; False when the peer failed."""
        row = self._kept["peers"].setdefault(peer.name, {"runs": {}})
        first = launch * self._args.repetitions
        todo = [
            (unit, repetition)
            for repetition in range(first, first + self._args.repetitions)
            for unit in self._units
            if any(str(repetition) not in row["runs"].get(name, {}) for name in unit)
        ]
        if not todo:
            return True
        if self._left() < sum(expected(row, unit) for unit, _ in todo) + statistics.median(row.get("start_s", [0])):
            print(f"{peer.name}: no time left for launch {launch}", file=sys.stderr, flush=True)
            return True
        row |= {"version": peer.version, "bits": weight_bits(peer.name), "weight_bytes": peer.weight_bytes}
        row.pop("error", None)
        try:
            self._measure(peer, row, todo)
        except PeerError as error:
            row["error"] = str(error)
            print(error, file=sys.stderr, flush=True)
        self._save()
        return "error" not in row

    def _measure(self, peer: Peer, row: dict[str, Any], todo: list[tuple[tuple[str, ...], int]]) -> None:
        running = Running(peer, self._cores, self._maker.first_request(), self._args.log)
        try:
            row.setdefault("start_s", []).append(running.start_s)
            running.run(self._maker.warm_up())
            for unit, repetition in todo:
                if self._left() < expected(row, unit):
                    print(f"{peer.name}: no time left for {' '.join(unit)}", file=sys.stderr, flush=True)
                    continue
                for name, figures in self._quietest(running, unit, repetition).items():
                    row["runs"].setdefault(name, {})[str(repetition)] = figures
                    told = f"{peer.name} {name} {figures['seconds']:.2f} s, others {figures['busy']:.0%}"
                    print(told, file=sys.stderr, flush=True)
                row["peak_bytes"] = max(running.peak_bytes(), row.get("peak_bytes", 0))
                self._save()
        finally:
            running.stop()

    def _quietest(self, running: Running, unit: tuple[str, ...], repetition: int) -> dict[str, Figures]:
        """Figures of a unit's workloads, from the try beside which others took least."""
        tries: list[dict[str, Figures]] = []
        for number in range(self._args.tries):
            again = repetition + _AGAIN * number
            tries.append({name: self._once(running, name, again) for name in unit})
            if disturbance(tries[-1]) <= BUSY or self._left() < 0:
                break
        quietest = min(tries, key=disturbance)
        return {name: figures | {"tries": len(tries)} for name, figures in quietest.items()}

    def _once(self, running: Running, name: str, repetition: int) -> Figures:
        workload = self._maker.make(name, repetition)
        with OtherWork(self._cores, lambda: [os.getpid(), *running.pids()]) as others:
            start = time.perf_counter()
            traces = running.run(workload)
            seconds = time.perf_counter() - start
        return describe(workload, traces, seconds) | {"busy": others.share}

    def _left(self) -> float:
        return self._end - time.monotonic()

    def _save(self) -> None:
        if self._args.output:
            part = Path(f"{self._args.output}.part")
            part.write_text(json.dumps(self._kept, indent=1) + "\n")
            part.replace(self._args.output)


def disturbance(tried: dict[str, Figures]) -> float:
    """The greatest share of others beside the workloads of one try."""
    return max(figures["busy"] for figures in tried.values())


def expected(row: dict[str, Any], unit: tuple[str, ...]) -> float:
    """Seconds that a unit took this row before; nothing where it is not known."""
    known = [[run["seconds"] for run in row["runs"].get(name, {}).values()] for name in unit]
    return sum(statistics.median(seconds) for seconds in known if seconds)


if __name__ == "__main__":
    main()
