"""Which files of a folder hold its weights; no header is read, and nothing here needs torch."""

from __future__ import annotations

import json
from pathlib import Path

from ...errors import CheckpointError
from ...log import get_logger

logger = get_logger(__name__)

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


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
        raise CheckpointError(f"{path} holds no .safetensors file; weights in other formats are not read")
    plain = [file for file in files if not file.name.startswith("consolidated")]
    return plain or files


def _indexed_files(path: Path, weight_map: dict[str, str]) -> list[Path]:
    first_tensor: dict[str, str] = {}
    for tensor, name in weight_map.items():
        first_tensor.setdefault(name, tensor)
    for name, tensor in sorted(first_tensor.items()):
        if not (path / name).is_file():
            count = sum(file == name for file in weight_map.values())
            raise CheckpointError(
                f"{path / name} is missing; {INDEX_FILE} says that it holds {tensor} and {count - 1} other tensors"
            )
    return [path / name for name in sorted(first_tensor)]


def weight_map_of(index: Path) -> dict[str, str]:
    """Tensor name to file name, as an index says it."""
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError):
        raise CheckpointError(f"{index} is not a safetensors index: it has no weight_map") from None
    return dict(weight_map)
