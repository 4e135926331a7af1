"""The quality card: a quantized model's figures beside its weights, as a model card, as JSON and as a picture."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import ModelCardData

from ..engine.sources import ModelFiles, resolve_model
from ..version import __version__
from .quality import Quality
from .quality_plot import save_plot
from .report import ModuleError, QuantizeReport, size_in_words

CARD, SECOND_CARD = "README.md", "QUANTIZATION.md"
FIGURES = "quality.json"
PLOT = "quality.png"
Row = tuple[str, ...]
_LAYER = re.compile(r"\blayers\.(\d+)\.")
_FRONT_MATTER = re.compile(r"---\s*\n(.*?)\n---\s*(?:\n|$)", re.DOTALL)
_LICENCE = re.compile(r"^license:[ \t]*['\"]?([A-Za-z0-9.+_-]+)['\"]?[ \t]*$", re.MULTILINE)


def write_quality_card(quality: Quality) -> list[Path]:
    """Write the card into the result's folder; the files, the picture only where matplotlib is installed.

    A source that has a README.md keeps it, byte for byte: the card is then QUANTIZATION.md.
    """
    report = quality.report
    files = resolve_model(report.model)
    figures, plot = report.output / FIGURES, report.output / PLOT
    figures.write_text(json.dumps(quality.as_dict(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    has_plot = save_plot(layer_errors(report), plot, _title(quality))
    card = report.output / (SECOND_CARD if (report.output / CARD).exists() else CARD)
    card.write_text(card_text(quality, files, has_plot), encoding="utf-8")
    return [card, figures, plot] if has_plot else [card, figures]


def card_text(quality: Quality, files: ModelFiles, has_plot: bool) -> str:
    """A model card with front matter."""
    report = quality.report
    base = quality.base_model
    data = ModelCardData(
        base_model=base,
        base_model_relation="quantized",
        license=_licence(files),
        library_name="transformers",
        quantized_by="twofold",
        tags=["twofold", "quantized", report.spec.method, report.format],
    )
    made = (
        f"Made from `{base}` by Twofold {__version__} (`twofold quantize`), and "
        f"stored in the format `{report.format}`. Serve it with `twofold serve`, or load it with any tool that reads "
        f"the format."
    )
    picture = [f"![Error of the weights by decoder layer]({PLOT})"] if has_plot else []
    parts = [
        f"---\n{data.to_yaml()}\n---",
        f"# {_title(quality)}",
        made,
        "## Quality",
        _quality_table(quality),
        "## What was done",
        _table(("", ""), [row for row in report.rows() if row[0] not in ("model", "output", "left plain", "note")]),
        *_notes(report),
        "## Errors by decoder layer",
        "Mean relative error of the weights of a layer's matrices, and the worst one; all are in `quality.json`.",
        *picture,
        _layer_table(report),
    ]
    return "\n\n".join(parts) + "\n"


def _title(quality: Quality) -> str:
    return f"{quality.base_model.rpartition('/')[2]}, {quality.report.spec.description}"


def layer_errors(report: QuantizeReport) -> dict[int, list[ModuleError]]:
    """Errors of the modules of each decoder layer."""
    layers: dict[int, list[ModuleError]] = {}
    for error in report.errors:
        if match := _LAYER.search(error.module):
            layers.setdefault(int(match[1]), []).append(error)
    return dict(sorted(layers.items()))


def _licence(files: ModelFiles) -> str | None:
    """What the source's own card says."""
    source = files.path / CARD
    if not source.is_file():
        return None
    front = _FRONT_MATTER.match(source.read_text(encoding="utf-8", errors="replace"))
    licence = _LICENCE.search(front[1]) if front else None
    return licence[1] if licence else None


def _quality_table(quality: Quality) -> str:
    result = quality.evaluation
    if result is None:
        return f"Not measured: {quality.reason}."
    rows: list[Row] = [("perplexity", f"{result.reference_perplexity:.4f}", f"{result.perplexity:.4f}")]
    rows.append(("divergence, KL(original, quantized)", "", f"{result.divergence:.5f} nats a token"))
    rows.append(("same top token", "", f"{result.same_top:.2%}"))
    sizes = (quality.report.bytes_before, quality.report.bytes_after)
    rows.append(("weight files", *map(size_in_words, sizes)))
    return f"On {quality.text}, which no method looked at.\n\n" + _table(("", "original", "quantized"), rows)


def _notes(report: QuantizeReport) -> list[str]:
    calibration = [f"Calibrated on {report.calibration}."] if report.calibration else []
    plain = [f"- `{module}` stays plain: {reason}" for module, reason in report.plain]
    notes = [f"- {note}" for note in report.notes]
    lines = "\n".join([*plain, *notes])
    return [*calibration, *([lines] if lines else [])]


def _layer_table(report: QuantizeReport) -> str:
    rows = []
    for number, errors in layer_errors(report).items():
        worst = max(errors, key=lambda error: error.relative_rms)
        mean = sum(error.relative_rms for error in errors) / len(errors)
        name = worst.module.partition(f"layers.{number}.")[2]
        rows.append((str(number), f"{mean:.4f}", f"`{name}` {worst.relative_rms:.4f}"))
    return _table(("layer", "mean", "worst"), rows)


def _table(head: Row, rows: Sequence[Row]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)
