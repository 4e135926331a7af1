"""Which files of a folder hold its weights; no header is read, and nothing here needs torch."""

from __future__ import annotations

import json
from pathlib import Path

from ...errors import CheckpointError
from ...log import get_logger

logger = get_logger(__name__)

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLE_INDEX_FILE = "pytorch_model.bin.index.json"
PICKLE_PATTERNS = ("pytorch_model*.bin", "*.pt", "*.pth")


def weight_files(path: Path) -> list[Path]:
    """The files to read: model.safetensors, else the index's shards, else every safetensors file of the folder."""
    single = path / SINGLE_FILE
    index = path / INDEX_FILE
    if single.is_file():
        if index.is_file() and any(name != SINGLE_FILE for name in weight_map_of(index).values()):
            logger.warning(
                "%s lists other files, but %s is complete in itself; the index is ignored", index, SINGLE_FILE
            )
        return [single]
    if index.is_file():
        return _indexed_files(path, weight_map_of(index))
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise CheckpointError(_nothing_to_read(path))
    plain = [file for file in files if not file.name.startswith("consolidated")]
    return plain or files


def is_pickled(path: Path) -> bool:
    """Whether a folder's weights are there as pickles only."""
    return not (path / INDEX_FILE).is_file() and not any(path.glob("*.safetensors")) and bool(_pickles(path))


def pickle_files(path: Path) -> list[Path]:
    """The pickles of a folder's weights: the index's shards, else all. CheckpointError when one is missing."""
    index = path / PICKLE_INDEX_FILE
    return _indexed_files(path, weight_map_of(index), index.name) if index.is_file() else _pickles(path)


def _pickles(path: Path) -> list[Path]:
    return sorted({file for pattern in PICKLE_PATTERNS for file in path.glob(pattern)})


def _nothing_to_read(path: Path) -> str:
    pickles = _pickles(path)
    if not pickles:
        return f"{path} holds no .safetensors file; weights in other formats are not read"
    return (
        f"{path} holds no .safetensors file but {pickles[0].name}, a pickle: a program that runs when it is loaded. "
        f"Convert the model to safetensors, or have its tensors alone read with --allow-pickle (allow_pickle=True)"
    )


def _indexed_files(path: Path, weight_map: dict[str, str], index: str = INDEX_FILE) -> list[Path]:
    first_tensor: dict[str, str] = {}
    for tensor, name in weight_map.items():
        first_tensor.setdefault(name, tensor)
    for name, tensor in sorted(first_tensor.items()):
        if not (path / name).is_file():
            count = sum(file == name for file in weight_map.values())
            raise CheckpointError(
                f"{path / name} is missing; {index} says that it holds {tensor} and {count - 1} other tensors"
            )
    return [path / name for name in sorted(first_tensor)]


def weight_map_of(index: Path) -> dict[str, str]:
    """Tensor name to file name, as an index says it."""
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError):
        raise CheckpointError(f"{index} is not a safetensors index: it has no weight_map") from None
    return dict(weight_map)
