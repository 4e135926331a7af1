"""The kernel report: the kernel that each class of layers and each operation got, and why not a better one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from .registry import Selection

# Kernels that round the inputs of weights as ``cpu_activations`` says.
ROUNDING_KERNELS = {"int8": {"c_int8_activations", "c_int16_activations"}, "bf16": {"c_bf16"}}


@dataclass(frozen=True, slots=True)
class LayerUse:
    """One weight that a kernel was chosen for: its class of layers, its problem, and its bytes when prepared."""

    layer: str
    problem: Any
    num_bytes: int


def report_rows(selections: Iterable[Selection], uses: Iterable[LayerUse]) -> list[dict[str, str]]:
    """One row per choice; a choice for weights has one for each class of layers, with ``layer count scheme bytes``."""
    by_problem: dict[Any, dict[str, list[int]]] = {}
    for use in uses:
        by_problem.setdefault(use.problem, {}).setdefault(use.layer, []).append(use.num_bytes)
    rows = []
    for selection in selections:
        row = selection.row()
        classes = by_problem.get(selection.problem, {})
        if not classes:
            rows.append(row)
        for layer, sizes in classes.items():
            facts = {"layer": layer, "count": str(len(sizes)), "scheme": str(selection.problem.scheme)}
            rows.append(row | facts | {"bytes": str(sum(sizes))})
    return rows


def report_lines(rows: Iterable[dict[str, str]]) -> list[str]:
    """The report in words, one line per row; layers first."""
    ordered = sorted(rows, key=lambda row: "layer" not in row)
    return [_line(row) for row in ordered]


def unused_activations(rows: Iterable[dict[str, str]], cpu_activations: str) -> str | None:
    """A sentence where ``cpu_activations`` asks for rounded inputs and no layer's kernel rounds any; else None."""
    kernels = ROUNDING_KERNELS.get(cpu_activations)
    if kernels is None or any("layer" in row and row["kernel"] in kernels for row in rows):
        return None
    needs = {
        "int8": "compiled kernels and weights of integers (such as --quantization int4 makes)",
        "bf16": "weights whose scheme leaves their inputs open",
    }
    return f"cpu_activations {cpu_activations!r} changes nothing here: it needs {needs[cpu_activations]}"


def _line(row: dict[str, str]) -> str:
    name = f"{row['op']} ({row['problem']})"
    size = ""
    if "layer" in row:
        name = f"{row['layer']} x{row['count']} ({row['problem']})"
        size = f", {int(row['bytes']) / 2**20:.1f} MiB"
    refused = f"; not {row['refused']}" if row["refused"] else ""
    return f"{name}: {row['kernel']}, {row['quality']}{size}{refused}"
