"""Tensor sources for format tests: tensors in memory, or all safetensors files of a folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from twofold.errors import CheckpointError

SHARED = Path(__file__).resolve().parents[3] / "shared"


class StoredTensors:
    """A TensorSource over a dictionary, which remembers what was read."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = dict(tensors)
        self.taken: list[str] = []

    @classmethod
    def from_folder(cls, folder: Path) -> StoredTensors:
        tensors: dict[str, Tensor] = {}
        for path in sorted(folder.glob("*.safetensors")):
            if path.name != "reference.safetensors":
                tensors.update(load_file(path))
        return cls(tensors)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self.tensors)

    def has(self, name: str) -> bool:
        return name in self.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        return self.tensors[name].dtype

    def get(self, name: str) -> Tensor:
        if name not in self.tensors:
            raise CheckpointError(f"{name} is missing")
        self.taken.append(name)
        return self.tensors[name]

    def location(self, name: str) -> str:
        return "memory"
