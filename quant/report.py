"""QuantizeReport: what quantizing a model did, in numbers."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .spec import QuantizeSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleError:
    """How far one quantized linear is from its original: ``relative_rms`` = ||Q - W|| / ||W||.

    ``output_error`` is that of its outputs on calibration data, where a method looked at some.
    """

    module: str
    relative_rms: float
    output_error: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeReport:
    """The outcome of one run.

    ``bits_per_weight`` counts everything stored for the quantized layers: codes, scales, zeros and indices;
    ``linear_bits`` what is stored for all linear layers of the decoder, ``model_bits`` for head and embedding too.
    ``plain`` are the decoder's linear layers that were left dense, with the reason; ``notes`` what happened to single
    layers. Sizes are bytes of weight files. ``peak_memory`` is the most that the process ever held, in bytes, with all
    that was loaded before.
    """

    model: str
    output: Path
    spec: QuantizeSpec
    num_layers: int
    errors: tuple[ModuleError, ...]
    plain: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    bits_per_weight: float
    linear_bits: float
    model_bits: float
    bytes_before: int
    bytes_after: int
    seconds: float
    format: str
    calibration: str | None
    peak_memory: int

    @property
    def worst(self) -> ModuleError:
        return max(self.errors, key=lambda error: error.relative_rms)

    @property
    def mean_error(self) -> float:
        return sum(error.relative_rms for error in self.errors) / len(self.errors)

    @property
    def note(self) -> str:
        """One sentence where the result is larger than its source, else nothing."""
        if self.bytes_after <= self.bytes_before:
            return ""
        after, before = size_in_words(self.bytes_after), size_in_words(self.bytes_before)
        return (
            f"the result is larger than its source ({after} from {before}): "
            "what stays plain takes 16 bits a weight, and the source stored its weights in few bits already"
        )

    def rows(self) -> list[tuple[str, str]]:
        """The report as lines of name and value."""
        rows = [
            ("model", self.model),
            ("output", str(self.output)),
            ("scheme", self.spec.description),
            ("format", self.format),
            ("decoder layers", str(self.num_layers)),
            ("linear layers", f"{len(self.errors)} quantized, {len(self.plain)} left plain"),
            ("bits per weight", self._bits()),
            ("weight files", f"{size_in_words(self.bytes_before)} before, {size_in_words(self.bytes_after)} after"),
            ("weight error", f"{self.mean_error:.4f} relative RMS on average"),
            ("worst layer", f"{self.worst.module} {self.worst.relative_rms:.4f}"),
            ("time", f"{self.seconds:.1f} s"),
            ("peak memory", size_in_words(self.peak_memory)),
        ]
        rows += [("left plain", f"{module}: {reason}") for module, reason in self.plain]
        rows += [("note", note) for note in self.notes]
        return rows + ([("note", self.note)] if self.note else [])

    def _bits(self) -> str:
        quantized = f", {self.bits_per_weight:.3f} in the quantized ones" if self.plain else ""
        return f"{self.linear_bits:.3f} over all linear layers{quantized}, {self.model_bits:.3f} over the whole model"

    def as_dict(self) -> dict[str, Any]:
        """The report for JSON."""
        return {**asdict(self), "output": str(self.output), "spec": str(self.spec)}


def size_in_words(count: int) -> str:
    """``1.20 GB`` or ``3.4 MB``."""
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
