"""``twofold doctor``: what this machine offers, what Twofold makes of it, and whether its kernels compute right."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any

from ..engine.config import DEVICES, EngineConfig
from ..errors import TwofoldError
from . import diagnosis


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("--device", choices=DEVICES, default=EngineConfig.__dataclass_fields__["device"].default,
                        help="the device to examine")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the report; 1 when a kernel computes wrong results or the device cannot be used."""
    report = make_report(args.device)
    print(json.dumps(report, indent=2) if args.json else render(report))
    return 1 if report["problems"] else 0


def make_report(device: str) -> dict[str, Any]:
    """Everything by section; ``problems`` lists in words what is wrong, best case nothing."""
    report: dict[str, Any] = {
        "versions": diagnosis.versions(),
        "compiler": diagnosis.compiler(),
        "cache": diagnosis.cache(),
        "environment": diagnosis.environment(),
        "device": {},
        "kernels": [],
        "problems": [],
    }
    try:
        _examine(device, report)
    except (ImportError, TwofoldError) as error:
        report["problems"].append(str(error))
    return report


def render(report: dict[str, Any]) -> str:
    """The report as text for a terminal."""
    lines = []
    for section in ("versions", "device", "compiler", "cache"):
        facts = {name: value for name, value in report[section].items() if name != "spec"}
        lines += [section, *(f"  {name:<20} {value}" for name, value in facts.items()), ""]
    lines.append("environment")
    for row in report["environment"]:
        state = "set" if row["set"] == "yes" else "default"
        lines.append(f"  {row['name']:<20} {row['value']} ({state}): {row['purpose']}")
    lines += ["", "kernels, best first"]
    heading = ""
    for row in report["kernels"]:
        if heading != (heading := f"  {row['op']} ({row['problem']})"):
            lines.append(heading)
        lines.append(f"    {row['status']:<9} {row['kernel']:<22} {row['quality']:<13} {row['detail']}")
    lines += ["", *(f"problem: {text}" for text in report["problems"])]
    if not report["problems"]:
        lines.append("Everything that was checked works.")
    return "\n".join(lines)


def _examine(device: str, report: dict[str, Any]) -> None:
    from ..platforms import select_platform
    from .kernel_check import check_kernels

    platform = select_platform(device)
    facts = {field.name: getattr(platform.spec, field.name) for field in dataclasses.fields(platform.spec)}
    report["device"] = platform.describe() | {"spec": {name: _plain(value) for name, value in facts.items()}}
    report["kernels"] = check_kernels(platform)
    report["problems"] += [
        f"{row['op']} ({row['problem']}): kernel {row['kernel']} is wrong: {row['detail']}"
        for row in report["kernels"]
        if row["status"] == "wrong"
    ]


def _plain(value: Any) -> Any:
    if isinstance(value, frozenset):
        return sorted(value)
    return value.value if hasattr(value, "value") else value
