"""``python -m twofold.kernels.triton.check``: compile every kernel for every architecture, without a GPU.

A spill, shared memory over the chip's limit, a missing matrix instruction, an 8-bit product that software emulates, a
compiler error and a compilation that takes longer than ``--timeout`` each fail the check. So does a kernel that moves
more bytes than its bound: see ``static_cost``, which runs in a process of its own.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ...errors import ConfigError
from . import static_cost
from .cases import Case, cases
from .check_compile import Outcome, check_case, warm_up
from .check_pool import run_forked
from .check_report import CHECK_TABLE, COST_TABLE, Line, keep_lines, line_text, markdown, write_markdown

TARGETS = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201")
COST_TARGETS = ("sm_90", "gfx942", "gfx1100")
# The first two get the whole subset, the others one case of each operation.
SUBSET_TARGETS = ("sm_90", "gfx942", "sm_80", "gfx1100")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 when nothing failed."""
    options = parse(argv)
    if os.environ.get("TRITON_INTERPRET") == "1":
        print("TRITON_INTERPRET=1 replaces the compiler; unset it for this check", file=sys.stderr)
        return 2
    # The default flips to off in triton 3.10; multiply-adds are what the kernels are written for.
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    try:
        targets = _targets(options)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    chosen = [(arch, case) for arch in targets for case in chosen_cases(arch, options)]
    counting = _start_static_cost(targets, options) if options.cost else None
    lines = _run(chosen, options)
    failed = sum(bool(line.outcome.problems) for line in lines)
    refused = sum(bool(line.outcome.refused) for line in lines)
    print(f"{len(lines) - refused - failed} passed, {refused} refused, {failed} failed", flush=True)
    cost_failed, cost_table = (False, "") if counting is None else _finish_static_cost(counting)
    if options.results:
        lines = keep_lines(options.results, lines, targets)
    if options.markdown:
        lines.sort(key=lambda line: (TARGETS.index(line.arch), line.op))
        write_markdown(options.markdown, CHECK_TABLE, markdown(lines))
        if cost_table:
            write_markdown(options.markdown, COST_TABLE, cost_table)
    return 1 if failed or cost_failed else 0


def _targets(options: argparse.Namespace) -> list[str]:
    if options.targets is None:
        return list(SUBSET_TARGETS if options.subset else TARGETS)
    targets = [name.strip() for name in options.targets.split(",") if name.strip()]
    unknown = [name for name in targets if name not in TARGETS]
    if unknown or not targets:
        raise ConfigError(f"--targets is {options.targets!r}; the check knows {', '.join(TARGETS)}")
    return targets


def _start_static_cost(targets: Sequence[str], options: argparse.Namespace) -> subprocess.Popen[str]:
    """Count in the interpreter, beside the compilations, for one architecture of each kind (for one in a subset)."""
    chosen = [name for name in COST_TARGETS if name in targets] or list(targets)
    chosen = chosen[:1] if options.subset else chosen
    command = [sys.executable, "-m", static_cost.__name__, "--targets", ",".join(chosen), "--match", options.match]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _finish_static_cost(counting: subprocess.Popen[str]) -> tuple[bool, str]:
    """(whether it failed, the table of the first step)."""
    output, errors = counting.communicate()
    print(output, end="", flush=True)
    print(errors, end="", file=sys.stderr)
    return counting.returncode != 0, output.strip().split("\n\n")[0]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options of the command."""
    parser = argparse.ArgumentParser(prog="python -m twofold.kernels.triton.check", description=__doc__)
    parser.add_argument("--targets", help=f"comma-separated architectures (default: {','.join(TARGETS)})")
    parser.add_argument("--subset", action="store_true", help="a representative part, for continuous integration")
    parser.add_argument("--match", default="", help="only cases whose name contains this text")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compilations at a time")
    parser.add_argument("--timeout", type=float, default=180.0, help="seconds for one compilation")
    parser.add_argument("--failures", action="store_true", help="print only what failed")
    parser.add_argument("--no-cost", dest="cost", action="store_false", help="leave out the static cost")
    parser.add_argument("--results", type=Path, help="keep the outcomes in this file, beside those of other targets")
    parser.add_argument(
        "--markdown", type=Path, help="put the summary between the check-table markers of this document"
    )
    return parser.parse_args(argv)


def chosen_cases(arch: str, options: argparse.Namespace) -> list[Case]:
    """The cases to compile: in a subset the marked ones, and of each operation one for further architectures."""
    chosen = [case for case in cases(arch) if options.match in case.name and (case.in_subset or not options.subset)]
    if options.subset and arch not in SUBSET_TARGETS[:2]:
        chosen = list({case.op: case for case in reversed(chosen)}.values())
    return chosen


def _run(chosen: list[tuple[str, Case]], options: argparse.Namespace) -> list[Line]:
    lines = []
    warm_up(case for _, case in chosen)
    for index, outcome, error in run_forked(_work, chosen, options.jobs, options.timeout):
        arch, case = chosen[index]
        if error is not None:
            outcome = Outcome(problems=(f"{error.splitlines()[0]} {error.splitlines()[-1]}",))
        line = Line(arch, case.op, case.variant, outcome)
        lines.append(line)
        if outcome.problems or not options.failures:
            print(line_text(line), flush=True)
    return lines


def _work(item: tuple[str, Case]) -> Outcome:
    arch, case = item
    return check_case(case, arch)


if __name__ == "__main__":
    sys.exit(main())
