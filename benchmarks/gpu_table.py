"""The one table of `gpu_check.sh`: `gpu_table.py kernels.json engine.jsonl`.

Of each workload the kernel that the engine would choose; of the engine tokens per second beside transformers'.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HEADS = ("what", "kernel", "us or tokens/s", "GB/s", "TFLOP/s", "of bound", "vs torch or transformers")


def main() -> int:
    """Print the table; exit code 1 when a kernel failed or the engine gave no figure."""
    kernels, engine = (Path(name) for name in sys.argv[1:3])
    figures = json.loads(kernels.read_text()) if kernels.exists() else {"rows": []}
    runs = [json.loads(line) for line in engine.read_text().splitlines() if line.startswith("{")]
    if figures["rows"]:
        copy, product = figures["copy"] / 1e9, figures["product"] / 1e12
        print(f"{figures['device']}: copy {copy:.0f} GB/s, matrix product {product:.1f} TFLOP/s\n")
    rows = [HEADS, ["---"] * len(HEADS), *kernel_rows(figures["rows"]), *engine_rows(runs)]
    print("\n".join(f"| {' | '.join(row)} |" for row in rows))
    if not figures.get("complete", True):
        print("\nthe kernels' time was over before all were measured")
    problems = failures(figures["rows"], runs)
    print("\n".join(["", *problems]) if problems else "\nno kernel failed")
    return 1 if problems or not figures["rows"] else 0


def kernel_rows(measurements: list[dict[str, Any]]) -> Iterator[list[str]]:
    """The first kernel that ran on each workload."""
    seen = set()
    for row in measurements:
        workload = row["op"], row["label"]
        if row["seconds"] is None or workload in seen:
            continue
        seen.add(workload)
        torch = "" if row["peer"] is None else f"{row['peer']:.2f}x {row['note'].removeprefix('torch: ')}"
        rates = [f"{row['bytes_per_second'] / 1e9:.0f}", f"{row['operations_per_second'] / 1e12:.2f}"]
        name = f"{row['op']} {row['label']}"
        yield [name, row["kernel"], f"{row['seconds'] * 1e6:.1f}", *rates, f"{100 * row['bound']:.0f} %", torch]


def engine_rows(runs: list[dict[str, Any]]) -> Iterator[list[str]]:
    """Prefill and decode of every engine and batch size."""
    base = {row["batch_size"]: row for row in runs if row["engine"] == "transformers" and "error" not in row}
    for row in runs:
        if "error" in row:
            yield [f"engine {row['engine']}", row["error"], "", "", "", "", ""]
            continue
        for phase in ("prefill", "decode"):
            speed = row[f"{phase}_tokens_per_second"]
            other = base.get(row["batch_size"])
            ratio = f"{speed / other[f'{phase}_tokens_per_second']:.2f}x" if other else ""
            yield [f"{phase}, {row['batch_size']} requests", row["engine"], f"{speed:.0f}", "", "", "", ratio]


def failures(measurements: list[dict[str, Any]], runs: list[dict[str, Any]]) -> list[str]:
    """Kernels and engines that ended in an error."""
    found = [f"{row['op']} {row['label']} {row['kernel']}: {row['note']}" for row in measurements if row["failed"]]
    found += [f"engine {row['engine']}: {row['error']}" for row in runs if "error" in row]
    return found


if __name__ == "__main__":
    sys.exit(main())
