"""``twofold quantize``: write a quantized checkpoint of a model."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..quant.calibration.spec import CalibrationSpec
from .parser import byte_size, whole_number
from .quantize_spec import add_spec_arguments, spec_from

if TYPE_CHECKING:
    from ..quant.report import QuantizeReport

_CALIBRATION = CalibrationSpec()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("model", metavar="MODEL", help="directory, .gguf file, hub id or catalogue name")
    parser.add_argument("--output", required=True, metavar="DIR", help="folder for the result; must be new or empty")
    add_spec_arguments(parser)
    _add_calibration(parser)
    parser.add_argument("--overwrite", action="store_true", help="replace a model that is already in DIR")
    parser.add_argument(
        "--max-shard-size", type=byte_size, default="4G", metavar="SIZE", help="largest weight file, such as 2G"
    )
    parser.add_argument("--json", metavar="FILE", help="write the report as JSON to FILE as well")
    parser.add_argument(
        "--no-card",
        action="store_true",
        help="do not evaluate the result beside the original, and write no quality card into DIR",
    )


def _add_calibration(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("calibration, for methods that look at text")
    group.add_argument(
        "--calibration", metavar="FILE", help="text, or JSON lines with text or messages (default: a built-in sample)"
    )
    group.add_argument(
        "--calibration-sequences",
        type=whole_number,
        default=_CALIBRATION.num_sequences,
        metavar="N",
        help="token windows to look at",
    )
    group.add_argument(
        "--calibration-length",
        type=whole_number,
        default=_CALIBRATION.length,
        metavar="TOKENS",
        help="length of a window",
    )
    group.add_argument(
        "--calibration-seed", type=whole_number, default=_CALIBRATION.seed, metavar="N", help="which windows are chosen"
    )
    group.add_argument(
        "--calibration-memory",
        type=byte_size,
        default="4G",
        metavar="SIZE",
        help="memory for what layers hand on to each other; more lies in the folder for temporary files",
    )


def run(args: argparse.Namespace) -> int:
    """Quantize and print the report."""
    from ..quant.pipeline import quantize_model
    from ..quant.progress import layer_progress

    spec = spec_from(args)
    calibration = CalibrationSpec(
        source=Path(args.calibration).expanduser() if args.calibration else None,
        num_sequences=args.calibration_sequences,
        length=args.calibration_length,
        seed=args.calibration_seed,
        memory=args.calibration_memory,
    )
    with layer_progress(f"quantizing {args.model}") as progress:
        report = quantize_model(
            args.model,
            spec,
            Path(args.output).expanduser(),
            progress,
            calibration=calibration,
            overwrite=args.overwrite,
            max_shard_bytes=args.max_shard_size,
        )
    _print(report.rows())
    figures = report.as_dict()
    if not args.no_card:
        figures["evaluation"] = _add_card(report)
    if args.json:
        Path(args.json).write_text(json.dumps(figures, indent=2) + "\n")
    return 0


def _add_card(report: QuantizeReport) -> dict[str, Any] | None:
    """Evaluate, print, and write the quality card; the figures."""
    from ..quant.progress import layer_progress
    from ..quant.quality import measure_quality
    from ..quant.quality_card import write_quality_card
    from ..quant.quality_plot import REMEDY, can_plot

    with layer_progress(f"evaluating {report.output}", "windows") as progress:
        quality = measure_quality(report, progress=progress)
    names = [path.name for path in write_quality_card(quality)]
    _print([*quality.rows(), ("quality card", ", ".join(names))])
    if not can_plot():
        _print([("note", f"no picture: matplotlib is not installed; {REMEDY}")])
    return quality.as_dict()["evaluation"]


def _print(rows: list[tuple[str, str]]) -> None:
    for name, value in rows:
        print(f"{name:<16}{value}")
