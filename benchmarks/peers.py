"""Twofold beside transformers on workloads W1 to W4: the same token ids, float32, the same threads, in one run.

    python benchmarks/peers.py MODEL_DIR [--engines a,b] [--workloads w1,w3c32] [--repetitions 3] [--output FILE.json]

MODEL_DIR is a folder in Hugging Face layout, so that every engine loads the same weights; `--from-gguf FILE` writes one
from a GGUF file first. Every engine runs in a fresh process, once per repetition, and engines take turns, so that a
slow minute of the machine hits all of them. Prints a Markdown table of medians and the ratio to transformers' own
continuous batching. Keep the machine otherwise idle.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from engines import ENGINES, PeakMemory, Trace
from workloads import NAMES, Workload, WorkloadMaker

BASELINE = "transformers-cb"


def main() -> None:
    """Measure in child processes and print the table."""
    args = parse_arguments()
    if args.child:
        measure(args)
        return
    if args.from_gguf:
        convert_gguf(Path(args.from_gguf), Path(args.model))
    results: list[dict[str, Any]] = []
    for repetition in range(args.repetitions):
        for engine in args.engines.split(","):
            result = run_child(args, engine, repetition)
            results.append(result)
            print(f"{engine}, repetition {repetition}: {brief(result)}", file=sys.stderr, flush=True)
    if args.output:
        Path(args.output).write_text(json.dumps(results, indent=1) + "\n")
    print(table(results))


def parse_arguments() -> argparse.Namespace:
    """Options; `--child` and `--repetition` are for the processes that measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL_DIR", help="folder in Hugging Face layout")
    parser.add_argument("--from-gguf", metavar="FILE", help="write MODEL_DIR from this GGUF file first")
    parser.add_argument("--engines", default=",".join(ENGINES), help="comma list of " + ", ".join(ENGINES))
    parser.add_argument("--workloads", default=",".join(NAMES), help="comma list of " + ", ".join(NAMES))
    parser.add_argument("--repetitions", type=int, default=3, help="launches of each engine")
    parser.add_argument("--threads", type=int, default=2, help="threads for each engine")
    parser.add_argument("--scale", type=int, default=1, help="divide all lengths and counts, for a smoke test")
    parser.add_argument("--output", metavar="FILE", help="write every figure as JSON")
    parser.add_argument("--child", metavar="ENGINE", help=argparse.SUPPRESS)
    parser.add_argument("--repetition", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    for name in args.engines.split(","):
        if name not in ENGINES:
            parser.error(f"unknown engine {name!r}; choose from {', '.join(ENGINES)}")
    for name in args.workloads.split(","):
        if name not in NAMES:
            parser.error(f"unknown workload {name!r}; choose from {', '.join(NAMES)}")
    return args


def convert_gguf(source: Path, target: Path) -> None:
    """Write a float32 checkpoint that every engine can load, with transformers' own reader of GGUF files."""
    if (target / "config.json").exists():
        return
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    if hasattr(model.config, "quantization_config"):  # transformers refuses to save what it dequantized itself
        del model.config.quantization_config
    plain = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32)
    plain.load_state_dict(model.state_dict())
    plain.save_pretrained(target)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(target)


def run_child(args: argparse.Namespace, engine: str, repetition: int) -> dict[str, Any]:
    """One launch of one engine."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(args.threads), "TOKENIZERS_PARALLELISM": "false"}
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        command = [sys.executable, __file__, args.model, "--child", engine, "--repetition", str(repetition)]
        command += ["--threads", str(args.threads), "--scale", str(args.scale), "--workloads", args.workloads]
        subprocess.run([*command, "--output", report.name], check=True, env=environment)
        result: dict[str, Any] = json.loads(Path(report.name).read_text())
    return result


def measure(args: argparse.Namespace) -> None:
    """Load one engine, warm it up, run every workload once, write the figures."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(args.model) / "tokenizer.json"))
    maker = WorkloadMaker(lambda text: tokenizer.encode(text, add_special_tokens=False).ids, args.scale)
    memory = PeakMemory()
    start = time.perf_counter()
    engine = ENGINES[args.child](args.model, args.threads)
    ready = time.perf_counter() - start
    engine.run(maker.warm_up())
    figures: dict[str, Any] = {}
    for name in args.workloads.split(","):
        workload = maker.make(name, args.repetition)
        start = time.perf_counter()
        traces = engine.run(workload)
        figures[name] = describe(workload, traces, start, time.perf_counter() - start)
    engine.close()
    result = {"engine": args.child, "repetition": args.repetition, "ready_s": ready, "workloads": figures}
    Path(args.output).write_text(json.dumps(result | {"peak_bytes": memory.stop()}))


def describe(workload: Workload, traces: list[Trace], start: float, seconds: float) -> dict[str, Any]:
    """Figures of one run. Output tokens are the asked ones: every engine ignores the end of text."""
    num_output = sum(request.num_output for request in workload.requests)
    waits = [trace.arrivals[0] - trace.started for trace in traces]
    steps = [
        (trace.arrivals[-1] - trace.arrivals[0]) / (request.num_output - 1)
        for trace, request in zip(traces, workload.requests, strict=True)
    ]
    return {
        "seconds": seconds,
        "output_tokens_per_s": num_output / seconds,
        "ttft_ms": 1000 * statistics.median(waits),
        "tpot_ms": 1000 * statistics.median(steps),
        "tokens": [trace.tokens for trace in traces],
    }


def table(results: list[dict[str, Any]]) -> str:
    """Markdown: medians per engine and workload, ratios to the baseline, agreement of the tokens, machine."""
    names = [name for name in NAMES if name in results[0]["workloads"]]
    engines = list(dict.fromkeys(result["engine"] for result in results))
    heading = ["engine", *(title for name in names for title in _TITLES[name]), "peak MB", "load s"]
    rows = [heading, ["---", *["---:"] * (len(heading) - 1)]]
    for engine in engines:
        own = [result for result in results if result["engine"] == engine]
        cells = [cell for name in names for cell in _cells(name, _medians(own, name))]
        rows.append(
            [
                engine,
                *cells,
                f"{statistics.median(result['peak_bytes'] for result in own) / 2**20:.0f}",
                f"{statistics.median(result['ready_s'] for result in own):.1f}",
            ]
        )
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([*lines, "", *ratios(results, engines, names), "", *agreement(results, engines, names)])


_TITLES = {
    "w1": ("W1 TTFT ms", "W1 tok/s"),
    "w2": ("W2 TTFT ms",),
    "w3c8": ("W3 c8 tok/s",),
    "w3c32": ("W3 c32 tok/s", "W3 c32 TTFT ms"),
    "w4": ("W4 cold s",),
    "w4warm": ("W4 warm s",),
}


def _cells(name: str, medians: dict[str, float]) -> list[str]:
    if name == "w1":
        return [f"{medians['ttft_ms']:.0f}", f"{1000 / medians['tpot_ms']:.1f}"]
    if name == "w2":
        return [f"{medians['ttft_ms']:.0f}"]
    if name == "w3c8":
        return [f"{medians['output_tokens_per_s']:.1f}"]
    if name == "w3c32":
        return [f"{medians['output_tokens_per_s']:.1f}", f"{medians['ttft_ms']:.0f}"]
    return [f"{medians['seconds']:.2f}"]


def _medians(results: list[dict[str, Any]], name: str) -> dict[str, float]:
    keys = ("seconds", "output_tokens_per_s", "ttft_ms", "tpot_ms")
    return {key: statistics.median(result["workloads"][name][key] for result in results) for key in keys}


def ratios(results: list[dict[str, Any]], engines: list[str], names: list[str]) -> list[str]:
    """How many times quicker than the baseline each engine finished each workload."""
    if BASELINE not in engines:
        return []
    lines = []
    for engine in engines:
        factors = []
        for name in names:
            own, base = (
                _medians([result for result in results if result["engine"] == which], name)["seconds"]
                for which in (engine, BASELINE)
            )
            factors.append(f"{name} {base / own:.2f}x")
        lines.append(f"- {engine} against {BASELINE}: " + ", ".join(factors))
    return lines


def agreement(results: list[dict[str, Any]], engines: list[str], names: list[str]) -> list[str]:
    """Of all requests, how many got exactly the tokens that transformers' generate gave."""
    judge = {result["repetition"]: result for result in results if result["engine"] == "transformers"}
    lines = []
    for engine in engines:
        same = total = 0
        for result in results:
            expected = judge.get(result["repetition"])
            if result["engine"] != engine or expected is None or engine == "transformers":
                continue
            for name in names:
                pairs = zip(result["workloads"][name]["tokens"], expected["workloads"][name]["tokens"], strict=True)
                same_here = [left == right for left, right in pairs if left]
                same, total = same + sum(same_here), total + len(same_here)
        if total:
            lines.append(f"- {engine}: {same} of {total} requests got the tokens of transformers' generate")
    return lines


def brief(result: dict[str, Any]) -> str:
    """One line for the log."""
    return ", ".join(f"{name} {figures['seconds']:.2f} s" for name, figures in result["workloads"].items())


if __name__ == "__main__":
    main()
