"""Figures of one run of a workload, and the table of all of them."""

from __future__ import annotations

import platform
import statistics
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from engines import Trace
from workloads import Workload

COLUMNS = [
    ("W1 TTFT ms", "w1", "ttft_ms", "{:.0f}"),
    ("W1 tok/s", "w1", "decode_tok_s", "{:.1f}"),
    ("W2 TTFT ms", "w2", "ttft_ms", "{:,.0f}"),
    ("W2 prompt tok/s", "w2", "prefill_tok_s", "{:,.0f}"),
    ("W3 c8 tok/s", "w3c8", "output_tok_s", "{:.1f}"),
    ("c8 TTFT ms", "w3c8", "ttft_ms", "{:,.0f}"),
    ("c8 ITL p99 ms", "w3c8", "itl_p99_ms", "{:,.0f}"),
    ("W3 c32 tok/s", "w3c32", "output_tok_s", "{:.1f}"),
    ("c32 TTFT ms", "w3c32", "ttft_ms", "{:,.0f}"),
    ("c32 ITL p99 ms", "w3c32", "itl_p99_ms", "{:,.0f}"),
    ("W4 cold s", "w4", "seconds", "{:.2f}"),
    ("W4 warm s", "w4warm", "seconds", "{:.2f}"),
]
# Share of the cores that others may take before a run counts as disturbed.
BUSY = 0.05


@dataclass(frozen=True, kw_only=True)
class Figure:
    """The median of the undisturbed runs; of all, ``disturbed``, where each had other work beside it.

    ``spread`` is half of what lies between the least and the greatest, as a part of the median; None of one run.
    """

    value: float
    spread: float | None
    disturbed: bool

    def text(self, form: str) -> str:
        """By a format, with the spread in per cent, and an asterisk when disturbed."""
        spread = "" if self.spread is None else f" ±{100 * self.spread:.0f}%"
        return form.format(self.value) + spread + ("*" if self.disturbed else "")


def figure(row: dict[str, Any], workload: str, key: str, limit: float = BUSY) -> Figure | None:
    """One figure of a row of the kept ones; None when it was not measured."""
    runs = list(row.get("runs", {}).get(workload, {}).values())
    quiet = [run for run in runs if run.get("busy", 0.0) <= limit]
    values = [run[key] for run in quiet or runs]
    if not values:
        return None
    value = statistics.median(values)
    spread = (max(values) - min(values)) / 2 / value if len(values) > 1 else None
    return Figure(value=value, spread=spread, disturbed=not quiet)


def describe(workload: Workload, traces: list[Trace], seconds: float) -> dict[str, float]:
    """Figures of one run of a workload; every peer made exactly the tokens that were asked for.

    ``decode_tok_s`` is of the time after the first token, ``prefill_tok_s`` of the time until it; latencies between
    tokens are between pieces of text.
    """
    from twofold.cli.percentiles import percentile

    num_output = sum(request.num_output for request in workload.requests)
    waits = [trace.arrivals[0] - trace.started for trace in traces]
    gaps = [later - earlier for trace in traces for earlier, later in pairwise(trace.arrivals)]
    figures = {
        "seconds": seconds,
        "output_tok_s": num_output / seconds,
        "ttft_ms": 1000 * percentile(waits, 50),
        "itl_p50_ms": 1000 * percentile(gaps, 50),
        "itl_p99_ms": 1000 * percentile(gaps, 99),
    }
    if len(traces) == 1:
        request, arrivals = workload.requests[0], traces[0].arrivals
        figures["prefill_tok_s"] = len(request.prompt) / waits[0]
        figures["decode_tok_s"] = (request.num_output - 1) / (arrivals[-1] - arrivals[0])
    return figures


def markdown(rows: list[list[str]]) -> list[str]:
    """Lines of a table, the first row its heading; columns after the first are set to the right."""
    heading, *rest = rows
    return ["| " + " | ".join(row) + " |" for row in (heading, ["---", *["---:"] * (len(heading) - 1)], *rest)]


def table(kept: dict[str, Any]) -> str:
    """Markdown: a row of medians for each peer, then versions, the machine and what it can do."""
    rows = [["engine", *(title for title, *_ in COLUMNS), "peak MB", "start s"]]
    for name, row in kept["peers"].items():
        if row.get("runs"):
            cells = [_cell(row, *column) for _, *column in COLUMNS]
            start = f"{statistics.median(row['start_s']):.1f}" if row.get("start_s") else "-"
            rows.append([name, *cells, f"{row.get('peak_bytes', 0) / 2**20:,.0f}", start])
    return "\n".join([*markdown(rows), "", *_notes(kept)])


def _cell(row: dict[str, Any], workload: str, key: str, form: str) -> str:
    found = figure(row, workload, key)
    return found.text(form) if found else "-"


def _notes(kept: dict[str, Any]) -> list[str]:
    measured = {name: row for name, row in kept["peers"].items() if row.get("runs")}
    counts = [len(runs) for row in measured.values() for runs in row["runs"].values()]
    lines = []
    if counts:
        lines.append(
            f"- medians of {min(counts)} to {max(counts)} runs of each workload without the disturbed ones; ± is half "
            f"of greatest less least; *: others took more than {BUSY:.0%} of the cores beside every run"
        )
    versions = {name.split(":")[0]: row.get("version", "?") for name, row in measured.items()}
    lines += [f"- versions: {', '.join(f'{name} {version}' for name, version in versions.items())}"]
    lines += [f"- machine: {_processor()}, Linux {platform.release()}, Python {platform.python_version()}"]
    lines += [f"- {key}: {word}" for key, word in kept.get("settings", {}).items()]
    lines += [f"- {name}: {row['error']}" for name, row in kept["peers"].items() if row.get("error")]
    speeds = kept["machine"].get("speeds", [])
    for key in speeds[0] if speeds else ():
        values = [speed[key] for speed in speeds]
        lines.append(
            f"- {key}: {statistics.median(values):.3g} (of {len(values)}: {min(values):.3g} to {max(values):.3g})"
        )
    return lines


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
