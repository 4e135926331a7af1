"""Quality: how good a quantized model came out, measured on text that nobody calibrated on."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..engine.config import EngineConfig
from ..engine.sources import resolve_model
from ..errors import TwofoldError
from ..log import get_logger
from ..platforms import select_platform
from ..version import __version__
from .evaluation import Evaluation, EvaluationSpec, evaluate
from .export import source_dtype
from .report import QuantizeReport, size_in_words

log = get_logger(__name__)

Progress = Callable[[int, int], None]
# A few short windows from all over the text: they rank methods, and take less than rounding to nearest does.
DEFAULT_TEXT = EvaluationSpec(num_windows=4, length=256)
# What evaluating takes beside the weights: logits of a window, caches.
SPARE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """``evaluation`` is None where the models were not run; ``reason`` says why in words."""

    report: QuantizeReport
    text: EvaluationSpec
    evaluation: Evaluation | None = None
    reason: str = ""
    seconds: float = 0.0

    @property
    def base_model(self) -> str:
        """A hub id as it is; of a path only the last name, which says nothing about the machine."""
        path = Path(self.report.model).expanduser()
        return path.resolve().name if path.exists() else self.report.model

    def rows(self) -> list[tuple[str, str]]:
        """What the report does not say, as lines of name and value."""
        if self.evaluation is None:
            return [("quality", f"not measured: {self.reason}")]
        return [*self.evaluation.rows(), ("evaluated in", f"{self.seconds:.1f} s on {self.text}")]

    def as_dict(self) -> dict[str, Any]:
        """Everything for JSON."""
        return {
            "twofold": __version__,
            "torch": torch.__version__,
            # Names without folders: these files are published.
            "report": self.report.as_dict() | {"model": self.base_model, "output": self.report.output.name},
            "text": str(self.text),
            "evaluation": None if self.evaluation is None else self.evaluation.as_dict(),
            "not_evaluated": self.reason or None,
            "evaluation_seconds": self.seconds,
        }


def measure_quality(
    report: QuantizeReport,
    text: EvaluationSpec | None = None,
    *,
    device: str = "auto",
    progress: Progress | None = None,
) -> Quality:
    """Run the original and the result of ``report`` on ``text``, one after the other, on ``device``.

    A model that the engine cannot run, or that does not fit its memory, is a reason and no error: the result is there
    already.
    """
    text = text or DEFAULT_TEXT
    started = time.perf_counter()
    try:
        if reason := _too_large(report, device):
            return Quality(report=report, text=text, reason=reason)
        result = evaluate(
            EngineConfig(model=str(report.output), device=device),
            text,
            reference=EngineConfig(model=report.model, device=device),
            progress=progress,
        )
    except (TwofoldError, torch.OutOfMemoryError) as error:
        log.warning("the result was written, but not evaluated: %s", error)
        return Quality(report=report, text=text, reason=str(error))
    return Quality(report=report, text=text, evaluation=result, seconds=time.perf_counter() - started)


def _too_large(report: QuantizeReport, device: str) -> str | None:
    """Why the original, which needs more memory than the result, does not fit."""
    platform = select_platform(device)
    stored: torch.dtype = getattr(torch, source_dtype(resolve_model(report.model)))
    needed = report.bytes_before * platform.preferred_dtype(stored).itemsize // stored.itemsize + SPARE_BYTES
    free = platform.memory().free
    if needed <= free:
        return None
    return (
        f"the original needs about {size_in_words(needed)} of memory and {size_in_words(free)} are free; run "
        f"twofold eval --reference on a larger machine"
    )
