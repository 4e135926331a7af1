"""The tables of the ahead-of-time check: one line per compilation, and a summary per operation and architecture."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .check_compile import Outcome, arch_facts

CHECK_TABLE, COST_TABLE = "check-table", "cost-table"


@dataclass(frozen=True, slots=True)
class Line:
    """One case on one architecture."""

    arch: str
    op: str
    variant: str
    outcome: Outcome

    @property
    def status(self) -> str:
        if self.outcome.refused:
            return f"refused: {self.outcome.refused}"
        return "; ".join(self.outcome.problems) or "ok"


def line_text(line: Line) -> str:
    """For the terminal."""
    outcome = line.outcome
    if outcome.refused:
        return f"{line.arch:8} {line.op:16} {line.variant:34} {line.status}"
    facts = f"{outcome.registers:4}r {outcome.shared:7}B {outcome.seconds:6.1f}s {outcome.loads:20} {outcome.matrix:24}"
    return f"{line.arch:8} {line.op:16} {line.variant:34} {facts} {line.status}"


def markdown(lines: Iterable[Line]) -> str:
    """One row per operation and architecture; registers, shared memory and seconds are the largest."""
    cells: dict[tuple[str, str], list[Line]] = {}
    for line in lines:
        cells.setdefault((line.op, line.arch), []).append(line)
    heads = ["op", "arch", "compiled", "registers", "shared memory (limit)", "matrix instructions"]
    heads += ["seconds", "refused", "failed"]
    rows = [_row(heads), _row(["---"] * len(heads))]
    rows += [_summary(op, arch, part) for (op, arch), part in sorted(cells.items())]
    return "\n".join(rows)


def _summary(op: str, arch: str, lines: list[Line]) -> str:
    done = [line.outcome for line in lines if not line.outcome.refused]
    failed = sum(bool(outcome.problems) for outcome in done)
    registers = max((outcome.registers for outcome in done), default=0)
    shared = max((outcome.shared for outcome in done), default=0)
    seconds = max((outcome.seconds for outcome in done), default=0.0)
    matrix = sorted({name for outcome in done for name in outcome.matrix.split(", ") if name})
    limit = arch_facts(arch).shared_memory // 1024
    memory = f"{shared / 1024:.1f} KiB ({limit})"
    counts = len(lines) - len(done), failed
    return _row([op, arch, len(done), registers, memory, ", ".join(matrix), f"{seconds:.1f}", *counts])


def _row(cells: Iterable[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def write_markdown(path: Path, name: str, text: str) -> None:
    """Put a table between the markers of its name in a document."""
    start, end = markers(name)
    before, rest = path.read_text().split(start)
    _, after = rest.split(end)
    path.write_text(f"{before}{start}\n{text}\n{end}{after}")


def markers(name: str) -> tuple[str, str]:
    """The lines around the generated table of a name."""
    return f"<!-- {name}: start -->", f"<!-- {name}: end -->"
