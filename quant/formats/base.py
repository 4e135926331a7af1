"""Format: how quantized bytes lie on disk, and how to bring them into the canonical layout."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

import torch
from torch import Tensor

from ..canonical import CanonicalWeight
from ..scheme import Scheme


class TensorSource(Protocol):
    """Named tensors on disk; ``get`` reads one. A checkpoint reader satisfies it."""

    @property
    def names(self) -> frozenset[str]:
        """Every tensor there is."""
        ...

    def has(self, name: str) -> bool: ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape from the header, without reading the data."""
        ...

    def dtype(self, name: str) -> torch.dtype: ...

    def get(self, name: str) -> Tensor:
        """Read one tensor; CheckpointError when it is missing or cut off."""
        ...

    def location(self, name: str) -> str:
        """Where the tensor lies, for messages: the file's name, or the files searched when there is none."""
        ...


class Format(ABC):
    """One on-disk format, set up by one checkpoint's quantization config."""

    name: str

    @abstractmethod
    def scheme(self, module: str) -> Scheme:
        """The scheme that the config declares for one linear module (``model.layers.0.self_attn.q_proj``)."""

    @abstractmethod
    def load(self, source: TensorSource, module: str, dtype: torch.dtype) -> CanonicalWeight:
        """Read one linear module's weight [N, K]; ``dtype`` is that of a dense result.

        CheckpointError when tensors are missing or do not fit each other.
        """

    @abstractmethod
    def tensor_names(self, module: str) -> tuple[str, ...]:
        """Every tensor name that the weight of ``module`` may use in this format, present or not, biases aside."""

    def load_bias(self, source: TensorSource, module: str, dtype: torch.dtype) -> Tensor | None:
        """The stored bias [N], or None when there is none or it is all zero.

        auto-gptq writes an all-zero bias for every layer it quantizes, whether the model has biases or not.
        """
        name = f"{module}.bias"
        if not source.has(name):
            return None
        bias = source.get(name).to(dtype)
        return bias if bool(bias.any()) else None
