"""A folder of PyTorch pickles (pytorch_model.bin, *.pt): read only when asked for, and only tensors of it.

A pickle is a program. torch's restricted reader (``weights_only``) builds tensors and refuses everything else.
"""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import torch
from torch import Tensor

from ...errors import CheckpointError
from .checkpoint import Checkpoint
from .weight_files import pickle_files


class PickleCheckpoint(Checkpoint):
    """All tensors of a folder's pickles. The files are mapped: data is read when a tensor is asked for."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._tensors: dict[str, tuple[Path, Tensor]] = {}
        for file in pickle_files(path):
            for name, tensor in _read_file(file).items():
                if name in self._tensors:
                    raise CheckpointError(
                        f"tensor {name} is in both {self._tensors[name][0]} and {file}; remove the stale file"
                    )
                self._tensors[name] = (file, tensor)
        self._names = frozenset(self._tensors)

    @property
    def names(self) -> frozenset[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensor(name).shape)

    def dtype(self, name: str) -> torch.dtype:
        return self._tensor(name).dtype

    def location(self, name: str) -> str:
        return str(self._tensors[name][0] if name in self._tensors else self.path)

    def _tensor(self, name: str) -> Tensor:
        if name not in self._tensors:
            raise CheckpointError(f"tensor {name} is missing from {self.location(name)}")
        return self._tensors[name][1]

    def _read(self, name: str) -> Tensor:
        return self._tensor(name).clone()


def _reason(error: Exception) -> str:
    """What is wrong with a pickle; torch's own words advise to run the program in it."""
    if isinstance(error, pickle.UnpicklingError):
        found = re.search(r"GLOBAL ([\w.]+)", str(error))
        return f"it calls {found[1]}" if found else "it holds more than tensors, or is damaged"
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _read_file(file: Path) -> dict[str, Tensor]:
    try:
        loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
        raise CheckpointError(
            f"{file} cannot be read as tensors alone ({_reason(error)}); convert the model to safetensors"
        ) from None
    if not isinstance(loaded, dict) or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise CheckpointError(
            f"{file} is not a dictionary of tensors, which a model's weights are; convert the model to safetensors"
        )
    return {str(name): tensor.detach() for name, tensor in loaded.items()}
