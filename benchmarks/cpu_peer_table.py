"""Figures of one run of a workload, and the table of all of them."""

from __future__ import annotations

import platform
import statistics
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


def table(kept: dict[str, Any]) -> str:
    """Markdown: a row of medians for each peer, then versions, the machine and what it can do."""
    heading = ["engine", *(title for title, *_ in COLUMNS), "peak MB", "start s"]
    rows = [heading, ["---", *["---:"] * (len(heading) - 1)]]
    for name, row in kept["peers"].items():
        if row.get("runs"):
            cells = [_cell(row["runs"], *column) for _, *column in COLUMNS]
            start = statistics.median(row["start_s"])
            rows.append([name, *cells, f"{row['peak_bytes'] / 2**20:,.0f}", f"{start:.1f}"])
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    counts = [len(runs) for row in kept["peers"].values() for runs in row.get("runs", {}).values()]
    if counts:
        lines += ["", f"Medians of {min(counts)} to {max(counts)} runs of each workload."]
    return "\n".join([*lines, "", *_notes(kept)])


def _cell(runs: dict[str, Any], workload: str, key: str, form: str) -> str:
    values = [run[key] for run in runs.get(workload, {}).values()]
    return form.format(statistics.median(values)) if values else "-"


def _notes(kept: dict[str, Any]) -> list[str]:
    versions = {name.split(":")[0]: row.get("version", "?") for name, row in kept["peers"].items() if row.get("runs")}
    lines = ["- Twofold's decode steps replay recorded graphs."]
    lines += [f"- versions: {', '.join(f'{name} {version}' for name, version in versions.items())}"]
    lines += [f"- machine: {_processor()}, Linux {platform.release()}, Python {platform.python_version()}"]
    speeds = kept["machine"].get("speeds", [])
    for key in speeds[0] if speeds else ():
        values = [speed[key] for speed in speeds]
        lines.append(
            f"- {key}: {statistics.median(values):.1f} (of {len(values)}: {min(values):.1f} to {max(values):.1f})"
        )
    return lines


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
