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
    """``name`` is what a user calls it; shapes are (N, K) of one linear; tensors go by their last name.

    ``mixes``        layers may differ in bits and group size.
    ``kv_caches``    types of KV cache whose scales the config can speak of.
    ``side_config``  a file beside config.json that tools of this format look for, with the same content.
    """

    name: ClassVar[str]
    mixes: ClassVar[bool] = True
    kv_caches: ClassVar[tuple[str, ...]] = ()
    side_config: ClassVar[str | None] = None

    @abstractmethod
    def cannot_hold(self, scheme: Scheme) -> str | None:
        """Why no matrix can be stored with ``scheme``, in words; None when some can."""

    @abstractmethod
    def does_not_fit(self, shape: tuple[int, ...], scheme: Scheme) -> str | None:
        """Why this matrix cannot, given that others can."""

    def cannot_store(self, shape: tuple[int, ...], scheme: Scheme) -> str | None:
        """Why a matrix cannot be stored with ``scheme``, in words; None when it can."""
        return self.cannot_hold(scheme) or self.does_not_fit(shape, scheme)

    @abstractmethod
    def tensor_layout(self, shape: tuple[int, int], scheme: Scheme) -> Layout:
        """Dtype and shape of each tensor of a linear."""

    @abstractmethod
    def to_tensors(self, weight: CanonicalWeight, scheme: Scheme) -> dict[str, Tensor]:
        """The tensors of one linear that was to have ``scheme``.

        Its own scheme may say less: no zeros, because all turned out to be the middle one.
        """

    @abstractmethod
    def config(
        self, schemes: Mapping[str, Scheme], plain: Sequence[str], method: str, kv_cache: str | None = None
    ) -> dict[str, Any]:
        """The ``quantization_config``: each quantized module's scheme, and the linear modules left plain.

        ``plain`` has neither embeddings nor the head: each format has its own way to leave those out.
        """
