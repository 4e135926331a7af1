"""The tables of the ahead-of-time check: one line per compilation, and summaries."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

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


def keep_lines(path: Path, lines: Sequence[Line], targets: Sequence[str]) -> list[Line]:
    """Put the lines of these targets in a JSON file in place of its older ones; (these and those of other targets)."""
    kept = [_line(entry) for entry in json.loads(path.read_text())] if path.exists() else []
    merged = [line for line in kept if line.arch not in targets] + list(lines)
    path.write_text(json.dumps([asdict(line) for line in merged], indent=0) + "\n")
    return merged


def _line(entry: dict[str, Any]) -> Line:
    outcome = {**entry["outcome"], "problems": tuple(entry["outcome"]["problems"])}
    return Line(entry["arch"], entry["op"], entry["variant"], Outcome(**outcome))


def markdown(lines: Sequence[Line]) -> str:
    """Three tables: what each architecture needed in all, each operation on each architecture, what is refused."""
    archs = list(dict.fromkeys(line.arch for line in lines))
    tables = (_by_arch(lines, archs), _by_operation(lines, archs), _refusals(lines))
    return "\n\n".join("\n".join(table) for table in tables)


def _by_arch(lines: Sequence[Line], archs: Sequence[str]) -> list[str]:
    heads = ["arch", "compiled", "refused", "failed", "registers", "shared memory (limit)", "seconds (longest)"]
    table = _head([*heads, "matrix instructions"])
    for arch in archs:
        own = [line.outcome for line in lines if line.arch == arch]
        done = [outcome for outcome in own if not outcome.refused]
        failed = sum(bool(outcome.problems) for outcome in done)
        memory = f"{_most(done, 'shared') / 1024:.1f} KiB ({arch_facts(arch).shared_memory // 1024})"
        seconds = f"{sum(outcome.seconds for outcome in done):.0f} ({_most(done, 'seconds'):.1f})"
        matrix = ", ".join(sorted({name for outcome in done for name in outcome.matrix.split(", ") if name}))
        counts = len(done), len(own) - len(done), failed
        table.append(_row([arch, *counts, _most(done, "registers"), memory, seconds, matrix]))
    return table


def _by_operation(lines: Sequence[Line], archs: Sequence[str]) -> list[str]:
    """A cell has the compilations, the most registers and the most shared memory in KiB."""
    cells: dict[str, dict[str, list[Outcome]]] = {}
    for line in lines:
        cells.setdefault(line.op, {}).setdefault(line.arch, []).append(line.outcome)
    table = _head(["op", *archs])
    for op, own in sorted(cells.items()):
        table.append(_row([op, *(_cell(own.get(arch, [])) for arch in archs)]))
    return table


def _cell(outcomes: Sequence[Outcome]) -> str:
    done = [outcome for outcome in outcomes if not outcome.refused]
    return f"{len(done)}: {_most(done, 'registers')}r {_most(done, 'shared') / 1024:.1f}K" if done else "-"


def _refusals(lines: Sequence[Line]) -> list[str]:
    """One row per operation and reason."""
    found: dict[tuple[str, str], list[Line]] = {}
    for line in lines:
        if line.outcome.refused:
            found.setdefault((line.op, line.outcome.refused.replace(line.arch, "the architecture")), []).append(line)
    table = _head(["op", "refused on", "what", "reason"])
    for (op, reason), own in sorted(found.items()):
        archs = dict.fromkeys(line.arch for line in own)
        variants = dict.fromkeys(line.variant for line in own)
        table.append(_row([op, ", ".join(archs), "; ".join(variants), reason]))
    return table


def _most(outcomes: Sequence[Outcome], name: str) -> Any:
    return max((getattr(outcome, name) for outcome in outcomes), default=0)


def _head(cells: Sequence[str]) -> list[str]:
    return [_row(cells), _row(["---"] * len(cells))]


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
