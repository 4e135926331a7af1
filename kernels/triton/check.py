"""``python -m twofold.kernels.triton.check``: compile every kernel for every architecture, without a GPU.

A spill, shared memory over the chip's limit, a missing matrix instruction, a compiler error and a compilation that
takes longer than ``--timeout`` each fail the check.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from .cases import Case, cases
from .check_compile import Outcome, check_case
from .check_pool import run_forked
from .check_report import Line, line_text, markdown, write_markdown

TARGETS = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201")
SUBSET_TARGETS = ("sm_80", "sm_90", "gfx942", "gfx1100")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 when nothing failed."""
    options = _parser().parse_args(argv)
    if os.environ.get("TRITON_INTERPRET") == "1":
        print("TRITON_INTERPRET=1 replaces the compiler; unset it for this check", file=sys.stderr)
        return 2
    # The default flips to off in triton 3.10; multiply-adds are what the kernels are written for.
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    default_targets = SUBSET_TARGETS if options.subset else TARGETS
    targets = options.targets.split(",") if options.targets else list(default_targets)
    chosen = [(arch, case) for arch in targets for case in cases(arch) if _wanted(case, options)]
    lines = _run(chosen, options)
    failed = sum(bool(line.outcome.problems) for line in lines)
    refused = sum(bool(line.outcome.refused) for line in lines)
    print(f"{len(lines) - refused - failed} passed, {refused} refused, {failed} failed")
    if options.markdown:
        write_markdown(options.markdown, markdown(sorted(lines, key=lambda line: (line.op, targets.index(line.arch)))))
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m twofold.kernels.triton.check", description=__doc__)
    parser.add_argument("--targets", help=f"comma-separated architectures (default: {','.join(TARGETS)})")
    parser.add_argument("--subset", action="store_true", help="a representative part, for continuous integration")
    parser.add_argument("--match", default="", help="only cases whose name contains this text")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compilations at a time")
    parser.add_argument("--timeout", type=float, default=180.0, help="seconds for one compilation")
    parser.add_argument("--failures", action="store_true", help="print only what failed")
    parser.add_argument(
        "--markdown", type=Path, help="put the summary between the check-table markers of this document"
    )
    return parser


def _wanted(case: Case, options: argparse.Namespace) -> bool:
    return options.match in case.name and (case.in_subset or not options.subset)


def _run(chosen: list[tuple[str, Case]], options: argparse.Namespace) -> list[Line]:
    lines = []
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
