"""``twofold eval``: perplexity of a model on text, and its distance from another one."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace

from .engine_options import add_engine_arguments, engine_config
from .parser import file_path, positive_int

_FIELDS = (
    "device", "dtype", "quantize", "quantization", "kv_cache_dtype", "cpu_activations", "num_threads", "strict_kernels",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("--reference", metavar="MODEL", help="the model to compare with, such as the unquantized one")
    parser.add_argument(
        "--text",
        type=file_path,
        metavar="FILE",
        help="text, or JSON lines with text or messages (default: a built-in sample)",
    )
    parser.add_argument("--windows", type=positive_int, default=8, metavar="N", help="token windows to look at")
    parser.add_argument("--length", type=positive_int, default=512, metavar="TOKENS", help="length of a window")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    add_engine_arguments(parser, only=_FIELDS)


def run(args: argparse.Namespace) -> int:
    """Evaluate and print the figures."""
    from ..quant.evaluation import EvaluationSpec, evaluate
    from ..quant.progress import layer_progress

    spec = EvaluationSpec(source=args.text, num_windows=args.windows, length=args.length)
    config = engine_config(args)
    reference = None
    if args.reference:
        reference = replace(
            config,
            model=args.reference,
            quantize=None,
            quantization=None,
            kv_cache_dtype="auto",
            cpu_activations="exact",
        )
    with layer_progress(f"evaluating {args.model}", "windows") as progress:
        result = evaluate(config, spec, reference=reference, progress=progress)
    if args.json:
        print(json.dumps(result.as_dict(), indent=2))
    else:
        for name, value in result.rows():
            print(f"{name:<16}{value}")
    return 0
