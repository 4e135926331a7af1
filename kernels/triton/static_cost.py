"""``python -m twofold.kernels.triton.static_cost``: bytes moved and operations of every kernel, without a GPU.

Each Triton candidate runs its small workloads in triton's interpreter, with an architecture's launch settings, while
every load, store and matrix product is counted by pointer argument; lanes that are masked off move nothing. The sum is
held against the workload's bound, so that a kernel that reads its weight twice is seen. Needs ``TRITON_INTERPRET=1``.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from ...platforms.arch_spec import spec_of_arch
from ...platforms.fp8 import fp8_dtype
from ...platforms.spec import Fp8Kind
from ..registry import Candidate, Registry
from ..workloads import MODELS, SMALL_STEPS, Inputs, Step, Workload, workloads
from .candidates import register_triton_ops
from .runtime import assume_device

# Few cores, so that small workloads fill them; the second step splits a long context over them all the same.
NUM_CORES = 4
STEPS = (*SMALL_STEPS, Step("decode 1", (1,), (600,)))
HEADS = ("op", "workload", "kernel", "arch", "bytes moved", "of bound", "requested", "operations", "of bound", "status")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What one candidate does for one workload.

    ``moved``      bytes: all that it stores, all that it loads from arguments that memory must serve, and of the cached
                   arguments what it touches, once per launch.
    ``requested``  bytes of every load and store, those that a cache serves too.
    ``operations`` of its matrix products (padding included) and float arithmetic.
    ``reads``      how often an argument's touched bytes are loaded on average, for each that is loaded.
    """

    workload: Workload
    kernel: str
    moved: int = 0
    requested: int = 0
    operations: int = 0
    reads: dict[str, float]
    error: str = ""
    step: str = ""

    @property
    def ratio(self) -> float:
        """Bytes moved over the bound."""
        return self.moved / self.workload.num_bytes

    @property
    def problem(self) -> str:
        """Why the check fails; "" when it does not."""
        if self.error or self.ratio <= self.workload.allowance:
            return self.error
        most = sorted(self.reads.items(), key=lambda item: -item[1])
        causes = [f"{name} {count:.1f} times" for name, count in most if name not in self.workload.cached][:2]
        return f"moves {self.ratio:.2f} of the bound (limit {self.workload.allowance:g}): reads {', '.join(causes)}"

    def cells(self) -> tuple[list[str], list[str]]:
        """The cells of a table before and after the architecture."""
        operations = self.operations / self.workload.operations if self.workload.operations else 0.0
        figures = [str(self.moved), f"{self.ratio:.2f}", f"{self.requested / self.workload.num_bytes:.2f}"]
        names = [self.workload.op, self.workload.label, self.kernel]
        return names, [*figures, str(self.operations), f"{operations:.1f}", self.problem or "ok"]


def measure_cost(workload: Workload, candidate: Candidate) -> Cost:
    """Run a workload in the interpreter and count."""
    from .counting import Counter

    call = workload.bind(candidate)
    with Counter() as counter:
        call()
    arguments = counter.arguments.values()
    cached = workload.cached
    return Cost(
        workload=workload,
        kernel=candidate.name,
        moved=sum(arg.stored + (arg.touched if arg.name in cached else arg.loaded) for arg in arguments),
        requested=sum(arg.stored + arg.loaded for arg in arguments),
        operations=counter.operations,
        reads={arg.name: arg.loaded / arg.touched for arg in arguments if arg.touched},
    )


def costs(arch: str, match: str = "") -> Iterator[Cost]:
    """Every Triton candidate that the architecture does not refuse, on the small workloads."""
    spec = spec_of_arch(arch)
    fp8 = None if spec.fp8 is Fp8Kind.NONE else fp8_dtype(spec.fp8)
    inputs = Inputs(torch.device("cpu"), torch.float16, fp8)
    registry = Registry()
    register_triton_ops(registry, spec)
    with assume_device(arch, NUM_CORES):
        for step, workload in _chosen(inputs, match):
            for candidate in registry.candidates(workload.op):
                if candidate.can_run(spec, workload.problem) is None:
                    yield replace(_guarded(workload, candidate), step=step.name)


def _chosen(inputs: Inputs, match: str) -> Iterator[tuple[Step, Workload]]:
    for step in STEPS:
        for workload in workloads(inputs, MODELS["tiny"], step):
            if match in f"{workload.op} {workload.label}":
                yield step, workload


def _guarded(workload: Workload, candidate: Candidate) -> Cost:
    try:
        return measure_cost(workload, candidate)
    except Exception as error:  # one kernel's failure is its own row
        return Cost(workload=workload, kernel=candidate.name, reads={}, error=f"{type(error).__name__}: {error}"[:200])


def markdown(counted: Iterable[tuple[str, Cost]]) -> str:
    """A Markdown table of (architecture, cost); architectures with the same figures share a row."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for arch, cost in counted:
        names, figures = cost.cells()
        rows.setdefault((*names, "", *figures), []).append(arch)
    merged = [[*row[:3], ", ".join(archs), *row[4:]] for row, archs in rows.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in [HEADS, ["---"] * len(HEADS), *merged])


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table for each step; exit code 1 when a kernel moves more than its workload allows."""
    parser = argparse.ArgumentParser(prog="python -m twofold.kernels.triton.static_cost", description=__doc__)
    parser.add_argument("--targets", default="sm_90,gfx942", help="comma-separated architectures")
    parser.add_argument("--match", default="", help="only workloads whose operation and label contain this text")
    options = parser.parse_args(argv)
    if os.environ.get("TRITON_INTERPRET") != "1":
        print("the static cost is counted by triton's interpreter; set TRITON_INTERPRET=1", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    counted = [(arch, cost) for arch in options.targets.split(",") for cost in costs(arch, options.match)]
    tables = ([(arch, cost) for arch, cost in counted if cost.step == step.name] for step in STEPS)
    print("\n\n".join(markdown(table) for table in tables if table))
    return 1 if any(cost.problem for _, cost in counted) else 0


if __name__ == "__main__":
    sys.exit(main())
