"""Checkpoints that real tools wrote (``../shared/checkpoints``), with logits computed outside this project."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from stored_tensors import SHARED
from torch import Tensor
from twofold import LLM

CHECKPOINTS = SHARED / "checkpoints"


def folders(*patterns: str) -> list[Path]:
    return sorted(path for pattern in patterns for path in CHECKPOINTS.glob(pattern))


def with_logits(paths: list[Path]) -> list[Path]:
    return [path for path in paths if (path / "reference.safetensors").is_file()]


def config_of(folder: Path) -> dict[str, object]:
    return json.loads((folder / "config.json").read_text())


def reference(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "reference.safetensors")


def engine_logits(folder: Path, ids: Tensor) -> Tensor:
    with LLM(str(folder), device="cpu", dtype="float32") as llm:
        return torch.stack([llm.logits(row) for row in ids.tolist()])


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual - expected).norm() / expected.norm()).item()


def row_errors(actual: Tensor, expected: Tensor) -> Tensor:
    """Relative RMS error of each row."""
    return ((actual - expected).norm(dim=-1) / expected.norm(dim=-1)).flatten()
