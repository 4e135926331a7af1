"""ModelFiles: where a model's files lie on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model on disk.

    ``name`` is what the user asked for. ``path`` is a folder in Hugging Face layout (kind ``directory``) or one file
    (kind ``gguf``). ``generation`` holds sampling defaults that the source knows where no generation_config.json can.
    """

    name: str
    path: Path
    kind: Literal["directory", "gguf"]
    generation: tuple[tuple[str, float], ...] = ()
