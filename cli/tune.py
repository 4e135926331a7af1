"""``twofold tune``: measure launch settings on the GPU at hand and keep those that are faster."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from ..errors import ConfigError, UnsupportedError
from .parser import number

# What compiling one setting took on average in the ahead-of-time check.
COMPILE_SECONDS = 2.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--arch", metavar="ARCH", help="with --dry-run: the architecture to list for (default: the GPU's)"
    )
    parser.add_argument("--match", default="", metavar="TEXT", help="only rows whose name contains this text")
    parser.add_argument("--dry-run", action="store_true", help="list what would be measured; needs no GPU")
    parser.add_argument(
        "--milliseconds", type=number(1, 60000), default=20.0, metavar="MS", help="time for each measurement"
    )
    parser.add_argument(
        "--seconds", type=number(1, 864000), default=3600.0, metavar="S", help="begin no measurement after this long"
    )
    parser.add_argument("--output", metavar="FILE", help="where to write (default: the cache folder)")


def run(args: argparse.Namespace) -> int:
    """Measure, or list, and write the table."""
    if args.arch is not None and not args.dry_run:
        raise ConfigError(f"--arch is {args.arch!r}; only --dry-run takes another architecture than this GPU's")
    return _list(args) if args.dry_run else _tune(args)


def _list(args: argparse.Namespace) -> int:
    from ..kernels.triton.tune import jobs
    from ..platforms import select_platform
    from ..platforms.arch_spec import spec_of_arch

    spec = select_platform("auto").spec if args.arch is None else spec_of_arch(args.arch)
    if spec.device_type != "cuda":
        raise ConfigError("there is no GPU here; name an architecture, as in --arch sm_90")
    total = 0
    for job in jobs(spec, args.match):
        total += 1 + len(job.settings)
        print(f"{job}: {1 + len(job.settings)} settings, now {job.current}")
    if not total:
        raise ConfigError(f"no row of the launch tables has {args.match!r} in its name; without --match all are listed")
    minutes = total * (args.milliseconds / 1000 + COMPILE_SECONDS) / 60
    print(f"{total} measurements for {spec.arch}, about {minutes:.0f} minutes with compiling")
    return 0


def _tune(args: argparse.Namespace) -> int:
    import torch

    from ..kernels.benchmark import inputs_of
    from ..kernels.timing import make_clock
    from ..kernels.triton.tune import Tuner, jobs
    from ..kernels.triton.tuned import user_file, write_rows
    from ..kernels.workloads import MODELS
    from ..platforms import select_platform

    platform = select_platform("auto")
    spec = platform.spec
    if spec.device_type != "cuda":
        raise UnsupportedError(
            "there is no GPU here to measure on; --dry-run --arch sm_90 lists what would be measured"
        )
    if not spec.has_triton:
        raise UnsupportedError('triton is not installed, so there is nothing to tune; pip install "twofold[triton]"')
    deadline = time.monotonic() + args.seconds
    with torch.inference_mode():
        tuner = Tuner(spec, inputs_of(platform), MODELS["8b"], make_clock(platform, args.milliseconds / 1000))
        rows = tuner.tune(list(jobs(spec, args.match)), deadline)
        if args.match in "crossover" and time.monotonic() < deadline:
            rows += tuner.tune_crossovers()
    target = Path(args.output) if args.output else user_file(spec.arch)
    write_rows(target, spec.name, {"torch": torch.__version__}, rows)
    print(f"{len(rows)} rows are faster than before; wrote {target}")
    return 0
