"""``twofold bench``: figures of the offline engine (latency, throughput), of any server (serve), of kernels."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from ..errors import ConfigError, TwofoldError
from . import bench_kernels
from .engine_options import add_engine_arguments, engine_config
from .load_generator import Load
from .parser import natural_int, number, positive_int
from .percentiles import table

_SERVE = Load()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the benchmarks and their options."""
    kinds = parser.add_subparsers(dest="kind", metavar="KIND", required=True, title="kinds")
    latency = kinds.add_parser("latency", help="one batch at a time: time to first token, time per token, GB/s")
    add_engine_arguments(latency)
    latency.add_argument("--batch-size", type=positive_int, default=1, metavar="N", help="prompts served together")
    _add_lengths(latency, 128, 128)
    latency.add_argument(
        "--iterations", type=positive_int, default=3, metavar="N", help="repetitions; medians are shown"
    )
    throughput = kinds.add_parser("throughput", help="many prompts at once: tokens/s and GFLOP/s")
    add_engine_arguments(throughput)
    throughput.add_argument(
        "--num-prompts", type=positive_int, default=32, metavar="N", help="prompts, all sent at once"
    )
    _add_lengths(throughput, 256, 64)
    serve = kinds.add_parser("serve", help="load on any OpenAI-compatible server: TTFT, ITL, TPOT, tokens/s")
    _add_serve_arguments(serve)
    kernels = kinds.add_parser("kernels", help="every kernel: GB/s and TFLOP/s, or a check by compiling, without a GPU")
    bench_kernels.add_arguments(kernels)
    for kind in (latency, throughput, serve, kernels):
        kind.add_argument("--json", metavar="FILE", help="write the figures as JSON to FILE, - for the terminal")


def run(args: argparse.Namespace) -> int:
    """Run one benchmark and print its figures."""
    if args.kind == "kernels":
        return bench_kernels.run(args)
    if args.kind == "serve":
        figures = _serve(args)
        rows = _serve_rows(figures)
    else:
        from .bench_offline import measure_latency, measure_throughput, offline_rows

        measure = measure_latency if args.kind == "latency" else measure_throughput
        figures = measure(engine_config(args), args)
        rows = offline_rows(figures)
    if args.json != "-":
        print(table(rows))
    if args.json:
        write_json(figures, args.json)
    return 1 if figures.get("num_failed") else 0


def _add_lengths(parser: argparse.ArgumentParser, input_len: int, output_len: int) -> None:
    parser.add_argument("--input-len", type=positive_int, default=input_len, metavar="N", help="tokens of each prompt")
    parser.add_argument(
        "--output-len", type=positive_int, default=output_len, metavar="N", help="tokens of each output"
    )


def _add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default="http://127.0.0.1:8000", metavar="URL", help="the server")
    parser.add_argument("--model", metavar="NAME", help="model id (default: the first that the server lists)")
    parser.add_argument("--api-key", metavar="KEY", help="key for the server")
    parser.add_argument(
        "--num-requests", type=positive_int, default=_SERVE.num_requests, metavar="N", help="requests to send"
    )
    parser.add_argument(
        "--concurrency",
        type=positive_int,
        metavar="N",
        help="requests open at once (default: 8; unlimited with --rate)",
    )
    parser.add_argument("--rate", type=number(1e-3, 1e6), metavar="R", help="requests per second, Poisson arrivals")
    _add_lengths(parser, _SERVE.input_len, _SERVE.output_len)
    parser.add_argument(
        "--range-ratio",
        type=number(0, 1),
        default=_SERVE.range_ratio,
        metavar="F",
        help="vary lengths by this fraction",
    )
    parser.add_argument(
        "--seed", type=natural_int, default=_SERVE.seed, metavar="N", help="seed of prompts and arrivals"
    )
    parser.add_argument("--timeout", type=number(1, 1e6), default=600.0, metavar="S", help="seconds without a byte")
    parser.add_argument(
        "--extra-body", default='{"ignore_eos": true}', metavar="JSON", help="fields merged into each request"
    )


def _serve(args: argparse.Namespace) -> dict[str, Any]:
    from .load_generator import calibrate, make_jobs, run_load
    from .openai_client import OpenAIClient

    client = OpenAIClient(args.url, api_key=args.api_key, timeout=args.timeout)
    extra = _extra_body(args.extra_body)
    names = [args.model] if args.model else client.model_names()
    if not names:
        raise TwofoldError(f"{args.url} lists no model; name one with --model")
    unlimited = args.num_requests if args.rate else _SERVE.concurrency
    load = Load(
        num_requests=args.num_requests,
        concurrency=args.concurrency or unlimited,
        rate=args.rate,
        input_len=args.input_len,
        output_len=args.output_len,
        range_ratio=args.range_ratio,
        seed=args.seed,
    )
    jobs = make_jobs(load, calibrate(client, names[0]), tag=f"Run {time.time_ns() % 1_000_000}")
    report = run_load(client, names[0], jobs, load.concurrency, extra).as_dict()
    return {"kind": "serve", "url": args.url, "model": names[0], "concurrency": load.concurrency, **report}


def _extra_body(text: str) -> dict[str, Any]:
    try:
        extra = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"--extra-body is not JSON: {error}") from error
    if not isinstance(extra, dict):
        raise ConfigError(f'--extra-body is {text}; it must be a JSON object such as {{"ignore_eos": true}}')
    return extra


def _serve_rows(figures: dict[str, Any]) -> list[list[str]]:
    rows = [["", "mean", "p50", "p90", "p99"]]
    for key, label in (("ttft_ms", "time to first token, ms"), ("itl_ms", "inter-token latency, ms"),
                       ("tpot_ms", "time per output token, ms")):  # fmt: skip
        rows.append([label, *(f"{figures[key][name]:.1f}" for name in rows[0][1:])])
    totals = {
        "requests": f"{figures['num_requests'] - figures['num_failed']} of {figures['num_requests']}",
        "seconds": f"{figures['seconds']:.2f}",
        "prompt tokens": str(figures["prompt_tokens"]),
        "output tokens": str(figures["output_tokens"]),
        "requests/s": f"{figures['requests_per_second']:.2f}",
        "output tokens/s": f"{figures['output_tokens_per_second']:.1f}",
        "total tokens/s": f"{figures['total_tokens_per_second']:.1f}",
    }
    rows += [[label, value, "", "", ""] for label, value in totals.items()]
    if figures["first_error"]:
        print(f"first error: {figures['first_error']}", file=sys.stderr)
    return rows


def write_json(figures: dict[str, Any], target: str) -> None:
    """To a file, or the terminal for ``-``."""
    text = json.dumps(figures, indent=2)
    if target == "-":
        print(text)
    else:
        Path(target).write_text(text + "\n")
