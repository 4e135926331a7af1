"""``twofold doctor``: what this machine offers, what Twofold makes of it, and whether its kernels compute right."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any

from ..engine.config import DEVICES, EngineConfig
from ..errors import ConfigError, TwofoldError
from . import diagnosis
from .engine_options import add_engine_arguments, engine_config

_MODEL_FIELDS = (
    "dtype", "quantization", "block_size", "kv_cache_dtype", "cpu_activations", "strict_kernels", "allow_pickle",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("--device", choices=DEVICES, default=EngineConfig.__dataclass_fields__["device"].default,
                        help="the device to examine")  # fmt: skip
    parser.add_argument("model", nargs="?", metavar="MODEL",
                        help="say which kernels this model would get, from its headers")  # fmt: skip
    parser.add_argument("--arch", metavar="ARCH", help="with MODEL: for a GPU such as gfx942 or sm_90, not this device")
    add_engine_arguments(parser, model=False, only=_MODEL_FIELDS)
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the report; 1 when a kernel is wrong, the device cannot be used or the model not be served. ConfigError for
    wrong options."""
    if args.model is not None:
        report = make_model_report(args)
        print(json.dumps(report, indent=2) if args.json else render_model(report))
        return 1 if report["problems"] else 0
    if args.arch is not None:
        raise ConfigError("--arch goes with a MODEL; the machine's own report needs the machine")
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


def make_model_report(args: argparse.Namespace) -> dict[str, Any]:
    """A model's kernels on a device, as the engine would report them; nothing of its weights is read."""
    from ..engine.core.sampler import select_sampling
    from ..engine.cpu_bfloat16 import on_device
    from ..engine.model_config import load_model_config
    from ..engine.models.survey import survey_model
    from ..engine.sources import resolve_model
    from ..engine.target import find_target
    from ..engine.tokenizer import vocabulary_size
    from ..kernels.kernel_set import KernelSet
    from ..kernels.problems import PlainProblem, dtype_name
    from ..kernels.report import unused_activations

    config, files = engine_config(args), resolve_model(args.model)
    report: dict[str, Any] = {"model": files.name, "kernels": [], "problems": []}
    try:
        target = find_target(config.device, args.arch)
        config = on_device(config, target.spec)
        dtype = target.compute_dtype(config.dtype, load_model_config(files).dtype)
        report |= {"arch": target.spec.arch, "dtype": dtype_name(dtype)}
        kernels = KernelSet(target.spec, strict=config.strict_kernels, cpu_activations=config.cpu_activations)
        survey = survey_model(
            files,
            kernels,
            dtype,
            block_size=config.block_size,
            quantization=config.quantization,
            kv_cache_dtype=config.kv_cache_dtype,
            allow_pickle=config.allow_pickle,
        )
        # What the core itself asks for, beside the model.
        kernels.select("copy_blocks", PlainProblem(dtype))
        select_sampling(kernels, min(survey.model.config.vocab_size, vocabulary_size(files)))
        report |= {"format": survey.format_name, "kernels": kernels.report()}
        report["compiler"] = _failure() if target.spec.device_type == "cpu" else {}
        report["note"] = unused_activations(report["kernels"], config.cpu_activations)
        report |= {"weight_bytes": survey.model.weight_bytes, "memory_bytes": survey.model.memory_bytes}
    except ConfigError:
        raise  # What was asked for is wrong, and so it is for every command.
    except TwofoldError as error:
        report["problems"].append(str(error))
    return report


def render_model(report: dict[str, Any]) -> str:
    """The model's report as text for a terminal."""
    from ..kernels.report import report_lines

    lines = []
    if report["kernels"]:
        sizes = [f"{report[name] / 2**20:.1f} MiB" for name in ("weight_bytes", "memory_bytes")]
        lines.append(f"{report['model']} ({report['format']}) on {report['arch']} in {report['dtype']}")
        lines += [f"weights: {sizes[0]}, {sizes[1]} in memory", ""]
    lines += report_lines(report["kernels"])
    lines += [f"compiler: {text}" for text in report.get("compiler", {}).values()]
    if report.get("note"):
        lines.append(f"note: {report['note']}")
    lines += [f"problem: {text}" for text in report["problems"]]
    return "\n".join(lines)


def _examine(device: str, report: dict[str, Any]) -> None:
    from ..platforms import select_platform
    from .kernel_check import check_kernels

    platform = select_platform(device)
    facts = {field.name: getattr(platform.spec, field.name) for field in dataclasses.fields(platform.spec)}
    report["device"] = platform.describe() | {"spec": {name: _plain(value) for name, value in facts.items()}}
    report["kernels"] = check_kernels(platform)
    if platform.spec.device_type == "cpu":
        report["compiler"] |= _failure()
    report["problems"] += [
        f"{row['op']} ({row['problem']}): kernel {row['kernel']} is wrong: {row['detail']}"
        for row in report["kernels"]
        if row["status"] == "wrong"
    ]


def _failure() -> dict[str, str]:
    """Why there are no compiled CPU kernels, where the rows only say that there are none."""
    from ..kernels.cpu.library import unavailable, why_unavailable

    reason = why_unavailable()
    return {} if reason is None or reason == unavailable() else {"failure": reason}


def _plain(value: Any) -> Any:
    if isinstance(value, frozenset):
        return sorted(value)
    return value.value if hasattr(value, "value") else value
