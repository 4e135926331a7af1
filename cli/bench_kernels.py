"""``twofold bench kernels``: times of every kernel on this device, or the check that needs no GPU."""

from __future__ import annotations

import argparse
import functools
import importlib.util
import os
import time
from typing import TYPE_CHECKING, Any

from ..engine.config import CPU_ACTIVATIONS
from ..errors import ConfigError, UnsupportedError
from .parser import number, positive_int

if TYPE_CHECKING:
    from ..platforms import Platform


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda", "rocm"), help="what to measure")
    parser.add_argument("--models", metavar="NAMES", help="whose shapes: tiny, 135m, 1b, 8b, 70b, separated by commas")
    parser.add_argument("--match", default="", metavar="TEXT", help="only workloads or cases that contain this text")
    parser.add_argument(
        "--milliseconds", type=number(1, 60000), default=100.0, metavar="MS", help="time for each measurement"
    )
    parser.add_argument(
        "--seconds", type=number(1, 86400), default=240.0, metavar="S", help="begin no measurement after this long"
    )
    parser.add_argument(
        "--cpu-activations",
        default="exact",
        choices=CPU_ACTIVATIONS,
        help="on a CPU, time the kernels that round inputs to 8 bits or to bfloat16, too",
    )
    parser.add_argument("--selected", action="store_true", help="only the kernels that an engine would choose")
    parser.add_argument("--compile-only", action="store_true", help="compile for GPUs that need not be here, and check")
    parser.add_argument("--targets", metavar="ARCHS", help="architectures to compile for (default: all ten)")
    parser.add_argument("--subset", action="store_true", help="compile a representative part")
    parser.add_argument("--jobs", type=positive_int, metavar="N", help="compilations at a time")


def run(args: argparse.Namespace) -> int:
    """Measure or compile, and print the table."""
    return _compile(args) if args.compile_only else _measure(args)


def _compile(args: argparse.Namespace) -> int:
    if args.json:
        raise ConfigError("--json goes with measurements; --compile-only prints its tables")
    if importlib.util.find_spec("triton") is None:
        raise UnsupportedError('triton is not installed, so nothing can be compiled; pip install "twofold[triton]"')
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise ConfigError("TRITON_INTERPRET=1 replaces triton's compiler; unset it")
    from ..kernels.triton import check

    words = ["--match", args.match]
    words += ["--targets", args.targets] if args.targets is not None else []
    words += ["--jobs", str(args.jobs)] if args.jobs else []
    return check.main([*words, *(["--subset"] if args.subset else [])])


def _measure(args: argparse.Namespace) -> int:
    for name in ("targets", "subset", "jobs"):
        if getattr(args, name):
            raise ConfigError(f"--{name} goes with --compile-only")
    from ..platforms import select_platform
    from .bench import write_json

    models = _models(args.models)
    platform = select_platform(args.device)
    platform.set_threads(None)
    models = models or ["135m" if platform.spec.device_type == "cpu" else "8b"]
    figures = measure_platform(platform, args, models, quiet=args.json == "-")
    if args.json:
        write_json(figures, args.json)
    return 0


def measure_platform(platform: Platform, args: argparse.Namespace, models: list[str], *, quiet: bool) -> dict[str, Any]:
    """Every measurement on a platform, printed as it is made, unless ``quiet``."""
    import torch

    from ..kernels.benchmark import all_workloads, inputs_of, markdown, measure, measure_bounds
    from ..kernels.kernel_set import default_registry
    from ..kernels.timing import make_clock

    spec, deadline, rows = platform.spec, time.monotonic() + args.seconds, []
    show = (lambda text: None) if quiet else functools.partial(print, flush=True)
    with torch.inference_mode():
        clock = make_clock(platform, args.milliseconds / 1000)
        bounds = measure_bounds(platform, clock)
        show(f"{spec.name} ({spec.arch}), torch {torch.__version__}: {bounds}\n")
        show(markdown([]))
        chosen = all_workloads(inputs_of(platform), models)
        wanted = (workload for workload in chosen if args.match in f"{workload.op} {workload.label}")
        registry = default_registry(spec, args.cpu_activations)
        for row in measure(platform, registry, wanted, clock, bounds, deadline, selected=args.selected):
            show(f"| {' | '.join(row.cells())} |")
            rows.append(row.as_dict())
    complete = time.monotonic() < deadline
    if not complete:
        show(f"\nstopped after {args.seconds:g} seconds: the rest was not measured")
    figures = {"copy": bounds.copy, "product": bounds.product, "complete": complete, "rows": rows}
    return {"kind": "kernels", "device": spec.name, "arch": spec.arch, **figures}


def _models(given: str | None) -> list[str]:
    from ..kernels.workloads import MODELS

    names = given.split(",") if given is not None else []
    if any(name not in MODELS for name in names):
        raise ConfigError(f"--models is {given!r}; shapes are known of {', '.join(MODELS)}")
    return names
