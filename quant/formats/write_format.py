"""WriteFormat: how quantized layers are laid out in a checkpoint that is written."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..canonical import CanonicalWeight
from ..scheme import Scheme

Layout = dict[str, tuple[torch.dtype, tuple[int, ...]]]


class WriteFormat(ABC):
    """``name`` is what a user calls it; shapes are (N, K) of one linear; tensors go by their last name."""

    name: ClassVar[str]

    @abstractmethod
    def cannot_store(self, shape: tuple[int, ...], scheme: Scheme) -> str | None:
        """Why a matrix cannot be stored with ``scheme``, in words; None when it can."""

    @abstractmethod
    def tensor_layout(self, shape: tuple[int, int], scheme: Scheme) -> Layout:
        """Dtype and shape of each tensor of a linear."""

    @abstractmethod
    def to_tensors(self, weight: CanonicalWeight) -> dict[str, Tensor]:
        """The tensors of one linear."""

    @abstractmethod
    def config(self, schemes: Mapping[str, Scheme], plain: Sequence[str], method: str) -> dict[str, Any]:
        """The ``quantization_config``: each quantized module's scheme, and the linears of the decoder left plain."""
