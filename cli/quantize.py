"""``twofold quantize``: write a quantized checkpoint of a model."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from ..quant.calibration.spec import CalibrationSpec
from ..quant.spec import CALIBRATED
from ..storage import writing
from .parser import byte_size, file_path, memory_size, whole_number
from .quantize_spec import add_spec_arguments, spec_from

if TYPE_CHECKING:
    from ..quant.report import QuantizeReport
    from ..quant.spec import QuantizeSpec

_CALIBRATION = CalibrationSpec()
# Option -> the field of CalibrationSpec that it sets.
_CALIBRATION_FIELDS = {
    "calibration": "source",
    "calibration_sequences": "num_sequences",
    "calibration_length": "length",
    "calibration_seed": "seed",
    "calibration_memory": "memory",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("model", metavar="MODEL", help="directory, .gguf file, hub id or catalogue name")
    parser.add_argument(
        "--output", required=True, type=file_path, metavar="DIR", help="folder for the result; must be new or empty"
    )
    add_spec_arguments(parser)
    _add_calibration(parser)
    parser.add_argument("--overwrite", action="store_true", help="replace a model that is already in DIR")
    parser.add_argument(
        "--max-shard-size", type=memory_size, default="4G", metavar="SIZE", help="largest weight file, such as 2G"
    )
    parser.add_argument("--json", type=file_path, metavar="FILE", help="write the report as JSON to FILE as well")
    parser.add_argument(
        "--no-card",
        action="store_true",
        help="do not evaluate the result beside the original, and write no quality card into DIR",
    )


def _add_calibration(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("calibration, for methods that look at text")
    group.add_argument(
        "--calibration",
        type=file_path,
        metavar="FILE",
        help="text, or JSON lines with text or messages (default: a built-in sample)",
    )
    group.add_argument(
        "--calibration-sequences",
        type=whole_number,
        metavar="N",
        help=f"token windows to look at (default: {_CALIBRATION.num_sequences})",
    )
    group.add_argument(
        "--calibration-length",
        type=whole_number,
        metavar="TOKENS",
        help=f"length of a window (default: {_CALIBRATION.length}, or what the model has positions for)",
    )
    group.add_argument(
        "--calibration-seed",
        type=whole_number,
        metavar="N",
        help=f"which windows are chosen (default: {_CALIBRATION.seed})",
    )
    group.add_argument(
        "--calibration-memory",
        type=byte_size,
        metavar="SIZE",
        help="memory for what layers hand on to each other; more lies in the folder for temporary files (default: 4G)",
    )


def run(args: argparse.Namespace) -> int:
    """Quantize and print the report."""
    from ..quant.pipeline import quantize_model
    from ..quant.progress import layer_progress

    spec = spec_from(args)
    calibration = _calibration(args, spec)
    if args.json is not None:
        _check_apart(args)
        _check_writable(args.json)
    _check_kept(args)
    with layer_progress(f"quantizing {args.model}") as progress:
        report = quantize_model(
            args.model,
            spec,
            args.output,
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
        with writing(args.json.parent):
            args.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


def _calibration(args: argparse.Namespace, spec: QuantizeSpec) -> CalibrationSpec:
    """What the options ask for. ConfigError where the method looks at no text."""
    given = {option: getattr(args, option) for option in _CALIBRATION_FIELDS if getattr(args, option) is not None}
    if given and not spec.is_calibrated:
        option = next(iter(given)).replace("_", "-")
        raise ConfigError(
            f"--{option} is for methods that look at text ({', '.join(sorted(CALIBRATED))}, fp8 with --variant static, "
            f"any with --kv-cache), not for --method {args.method}; leave it out"
        )
    return CalibrationSpec(**{_CALIBRATION_FIELDS[option]: value for option, value in given.items()})


def _check_apart(args: argparse.Namespace) -> None:
    """ConfigError where the report would take the place of the model, of the result or of the text."""
    report = args.json.resolve()
    for what, path in (("model", Path(args.model)), ("output", args.output), ("calibration", args.calibration)):
        taken = None if path is None else path.resolve()
        if taken is not None and (report == taken or taken in report.parents):
            raise ConfigError(f"--json {args.json} is or lies in the {what} ({path}); name a file elsewhere")


def _check_kept(args: argparse.Namespace) -> None:
    """ConfigError where --overwrite would remove the text that is looked at."""
    if args.calibration is not None and args.output.resolve() in args.calibration.resolve().parents:
        raise ConfigError(
            f"--calibration {args.calibration} lies in the output {args.output}, which is replaced; move the text"
        )


def _check_writable(file: Path) -> None:
    """ConfigError where the report cannot go, before hours of work rather than after."""
    if file.is_dir():
        raise ConfigError(f"--json {file} is a folder; name a file")
    is_new = not file.exists()
    try:
        with file.open("a"):
            pass
        if is_new:
            file.unlink()
    except OSError as error:
        raise ConfigError(f"--json {file} cannot be written: {error.strerror}; name a file in another folder") from None


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
