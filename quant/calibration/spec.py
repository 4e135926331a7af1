"""CalibrationSpec: which text a method looks at, and how much of it. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from ...errors import ConfigError

DEFAULT_MEMORY = 4 << 30
DEFAULT_LENGTH = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationSpec:
    """``num_sequences`` windows of ``length`` tokens; None: 512, or as many as the model has positions for.

    ``source`` is a text file, or JSON lines with ``text``, ``prompt`` or ``messages``; None is the sample that comes
    with Twofold (the Jargon File, public domain). ``seed`` chooses the windows. ``memory`` bytes of hidden states and
    inputs are kept in memory, in 16 bits; more lies on disk. It changes no result.
    """

    source: Path | None = None
    num_sequences: int = 32
    length: int | None = None
    seed: int = 0
    memory: int = DEFAULT_MEMORY

    def __post_init__(self) -> None:
        if self.num_sequences < 1:
            raise ConfigError(f"calibration: {self.num_sequences} sequences; at least 1 is needed")
        if self.length is not None and self.length < 2:
            raise ConfigError(f"calibration: sequences of {self.length} tokens; at least 2 are needed")
        if self.source is not None:
            check_text_file("calibration", self.source)

    def for_model(self, positions: int) -> CalibrationSpec:
        """This with the length that a model of so many positions gets. ConfigError where a longer one was asked for."""
        if self.length is not None and self.length > positions:
            raise ConfigError(
                f"calibration: sequences of {self.length} tokens; this model has positions for {positions}, ask for "
                f"that or less"
            )
        return replace(self, length=self.length or min(DEFAULT_LENGTH, positions))

    def describe(self, num_windows: int) -> str:
        """What was looked at, in words, where the text held ``num_windows``."""
        source = "the built-in sample" if self.source is None else self.source.name
        return f"{num_windows} x {self.length} tokens of {source}, seed {self.seed}"


def check_text_file(what: str, path: Path) -> None:
    """ConfigError where there is no file at ``path``; what it holds is looked at when it is read."""
    if path.is_dir():
        raise ConfigError(f"{what} file {path} is a folder; give one text or .jsonl file")
    if not path.is_file():
        reason = "is no ordinary file" if path.exists() else "does not exist"
        raise ConfigError(f"{what} file {path} {reason}; give a text or .jsonl file")
