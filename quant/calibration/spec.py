"""CalibrationSpec: which text a method looks at, and how much of it. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ...errors import ConfigError

DEFAULT_MEMORY = 4 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationSpec:
    """``num_sequences`` windows of ``length`` tokens.

    ``source`` is a text file, or JSON lines with ``text``, ``prompt`` or ``messages``; None is the sample that comes
    with Twofold (the Jargon File, public domain). ``seed`` chooses the windows. ``memory`` bytes of hidden states and
    inputs are kept in memory, in 16 bits; more lies on disk. It changes no result.
    """

    source: Path | None = None
    num_sequences: int = 32
    length: int = 512
    seed: int = 0
    memory: int = DEFAULT_MEMORY

    def __post_init__(self) -> None:
        if self.num_sequences < 1:
            raise ConfigError(f"calibration: {self.num_sequences} sequences; at least 1 is needed")
        if self.length < 2:
            raise ConfigError(f"calibration: sequences of {self.length} tokens; at least 2 are needed")
        if self.source is not None and not self.source.is_file():
            raise ConfigError(f"calibration file {self.source} does not exist; give a text or .jsonl file")

    def __str__(self) -> str:
        source = "the built-in sample" if self.source is None else self.source.name
        return f"{self.num_sequences} x {self.length} tokens of {source}, seed {self.seed}"
