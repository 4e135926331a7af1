"""From files to token windows."""

from __future__ import annotations

import importlib.resources
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from ...errors import ConfigError, RequestError
from .spec import DEFAULT_LENGTH, CalibrationSpec

CALIBRATION_SAMPLE = "calibration.txt"
EVALUATION_SAMPLE = "evaluation.txt"


class Encoder(Protocol):
    """The part of a tokenizer that calibration needs."""

    bos_token_id: int | None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def encode_chat(self, messages: list[dict[str, Any]], **options: Any) -> list[int]: ...


def sample_path(name: str) -> Path:
    """A text that comes with the package."""
    return Path(str(importlib.resources.files(__package__) / "samples" / name))


def calibration_windows(tokenizer: Encoder, spec: CalibrationSpec) -> Tensor:
    """Token windows int64 [B, L] for ``spec``; fewer where the text is too short for all of them (`shortage` says so).

    ConfigError for a file that cannot be read as text, or one that holds less than one window.
    """
    path = spec.source or sample_path(CALIBRATION_SAMPLE)
    windows = text_windows(tokenizer, path, spec.length or DEFAULT_LENGTH)
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(spec.seed))
    return windows[order[: spec.num_sequences]]


def shortage(path: Path | None, windows: Tensor, wanted: int) -> str | None:
    """A sentence where a text held fewer than ``wanted`` of ``windows`` [B, L], else None."""
    count, length = windows.shape
    if count >= wanted:
        return None
    name = "the built-in sample" if path is None else path.name
    return f"{name} holds {count} windows of {length} tokens, {wanted} were asked for: give more text"


def text_windows(tokenizer: Encoder, path: Path, length: int) -> Tensor:
    """All neighbouring windows int64 [B, L] of a text file or JSON lines; each begins with BOS where there is one."""
    tokens: list[int] = []
    for ids in _documents(tokenizer, path):
        tokens += ids
    bos = _beginning(tokenizer)
    step = length - len(bos)
    count = len(tokens) // step
    if count == 0:
        raise ConfigError(f"{path} holds {len(tokens)} tokens, less than one window of {length}; give more text")
    windows = torch.tensor(tokens[: count * step], dtype=torch.int64).view(count, step)
    return torch.cat([torch.tensor([bos] * count, dtype=torch.int64).view(count, len(bos)), windows], 1)


def _beginning(tokenizer: Encoder) -> list[int]:
    """The BOS id where the tokenizer puts one in front of a text."""
    first = tokenizer.encode("a")[:1]
    return first if first == [tokenizer.bos_token_id] else []


def _documents(tokenizer: Encoder, path: Path) -> Iterator[list[int]]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"cannot read {path} as UTF-8 text: {error}; convert it, or give another file") from None
    if "\0" in text:
        raise ConfigError(f"{path} is no text: it holds bytes of zero; give a file of UTF-8 text or JSON lines")
    if path.suffix not in (".jsonl", ".json"):
        yield tokenizer.encode(text, add_special_tokens=False)
        return
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            yield _record(tokenizer, line, f"{path} line {number}")


def _record(tokenizer: Encoder, line: str, place: str) -> list[int]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{place} is not JSON: {error}; write one JSON object a line") from None
    if isinstance(record, dict):
        text = next((record[key] for key in ("text", "prompt") if isinstance(record.get(key), str)), None)
        if text is not None:
            return tokenizer.encode(text, add_special_tokens=False)
        if isinstance(record.get("messages"), list):
            try:
                return tokenizer.encode_chat(record["messages"], add_generation_prompt=False)
            except RequestError as error:
                raise ConfigError(f"{place}: {error}") from None
    raise ConfigError(f"{place} has neither text, prompt nor messages; write one JSON object a line")
