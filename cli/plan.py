"""``twofold plan``: what a model needs and how many requests fit, before loading it."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import TYPE_CHECKING

from .engine_options import add_engine_arguments, engine_config
from .parser import memory_size, positive_int

if TYPE_CHECKING:
    from ..engine.plan import ModelPlan, SchemePlan

_FIELDS = (
    "device", "dtype", "quantization", "max_model_len", "block_size", "kv_cache_dtype", "cpu_activations",
    "kv_cache_bytes", "memory_fraction", "max_num_seqs", "max_num_batched_tokens", "strict_kernels", "allow_pickle",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("--arch", metavar="ARCH", help="plan for a GPU such as gfx942 or sm_90 (default: this device)")
    parser.add_argument("--memory", type=memory_size, metavar="SIZE",
                        help="memory for weights and KV cache (default: what is free on this device)")  # fmt: skip
    parser.add_argument("--lengths", type=positive_int, nargs="+", metavar="N",
                        help="request lengths, prompt plus output (default: some up to the longest)")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    add_engine_arguments(parser, only=_FIELDS)


def run(args: argparse.Namespace) -> int:
    """Print the plan; 1 when the model fits in no scheme."""
    from ..engine.plan import make_plan
    from ..engine.sources import resolve_model
    from ..engine.target import find_target

    config = engine_config(args)
    target = find_target(args.device, args.arch, args.memory)
    plan = make_plan(resolve_model(args.model), config, target, args.lengths)
    print(json.dumps(dataclasses.asdict(plan), indent=2) if args.json else render(plan))
    return 0 if any(row.num_blocks for row in plan.plans) else 1


def render(plan: ModelPlan) -> str:
    """The plan as text for a terminal."""
    lines = [
        f"{plan.model} on {plan.arch}, {_size(plan.free_bytes)} free, computing in {plan.dtype}",
        f"workspace of a step: {_size(plan.workspace_bytes)}; sequences of up to {plan.max_model_len} tokens",
        *_caches(plan),
        "",
    ]
    lengths = list(next((row.requests for row in plan.plans if row.requests), {}))
    heads = [f"{length:>7}" for length in lengths]
    columns = f"{'weights':<12}{'KV cache':<10}{'size':>11}{'in memory':>11}{'KV tokens':>12}"
    lines.append(f"{columns}   requests at once of {' '.join(heads)}")
    lines += [_row(row) for row in plan.plans]
    lines += ["", *dict.fromkeys(f"{row.quantization}: {_how(row)}" for row in plan.plans)]
    lines.append(f"One step computes at most {plan.max_num_seqs} requests (--max-num-seqs).")
    return "\n".join(lines)


def _caches(plan: ModelPlan) -> list[str]:
    """One line for each type of KV cache that is served."""
    rows = {row.kv_cache_dtype: row for row in plan.plans if not row.refused}
    return [
        f"KV cache {kind}: {_size(row.kv_bytes_per_token)} per token ({row.kv_dtype}), read by {row.attention}"
        for kind, row in rows.items()
    ]


def _row(row: SchemePlan) -> str:
    if row.refused:
        return f"{row.quantization:<12}{row.kv_cache_dtype:<10}not served here"
    sizes = f"{_size(row.weight_bytes):>11}{_size(row.memory_bytes):>11}"
    names = f"{row.quantization:<12}{row.kv_cache_dtype:<10}"
    if not row.kv_tokens:
        return f"{names}{sizes}   does not fit"
    counts = " ".join(f"{count:>7}" for count in row.requests.values())
    return f"{names}{sizes}{row.kv_tokens:>12}   {'':<20}{counts}"


def _how(row: SchemePlan) -> str:
    return row.refused or f"{', '.join(row.schemes)}; kernels {', '.join(row.kernels)}"


def _size(num_bytes: int) -> str:
    for unit, name in ((2**30, "GiB"), (2**20, "MiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.2f} {name}"
    return f"{num_bytes / 1024:.2f} KiB"
