"""A packed weight as the Triton kernels read it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...quant.canonical import CanonicalWeight, PackedWeight
from .unpack import as_units, codes_per_unit


@dataclass(frozen=True, slots=True, eq=False)
class PreparedWeight:
    """``stream`` [N, units or bytes] is the canonical bit stream, ``perm`` int32 [K] or None as in ``PackedWeight``.

    ``scales`` and ``zeros`` are [G,N], so that those of neighbouring output features are neighbours in memory.
    """

    bits: int
    shape: tuple[int, int]
    group_size: int
    stream: Tensor
    scales: Tensor
    zeros: Tensor | None
    perm: Tensor | None

    @property
    def pack(self) -> int:
        """Codes per unit of the stream."""
        return codes_per_unit(self.bits)


def prepare(weight: CanonicalWeight, dtype: torch.dtype) -> PreparedWeight:
    """The kernels' view of a ``PackedWeight``; the codes themselves are not copied. ``dtype`` is the activations'."""
    assert isinstance(weight, PackedWeight), "the packed matmul takes packed weights; can_run refuses dense ones"
    return PreparedWeight(
        bits=weight.scheme.bits,
        shape=weight.shape,
        group_size=weight.group_size,
        stream=as_units(weight.qweight.contiguous(), weight.scheme.bits),
        scales=_scales(weight.scales).t().contiguous(),
        zeros=None if weight.zeros is None else _zeros(weight.zeros).t().contiguous(),
        perm=weight.perm,
    )


def _scales(scales: Tensor) -> Tensor:
    """The checkpoint's own 16-bit scales, or float32: a bfloat16 model's fp16 scales lose nothing."""
    return scales if scales.dtype in (torch.float16, torch.bfloat16) else scales.float()


def _zeros(zeros: Tensor) -> Tensor:
    """Integers as they are; offsets as scales."""
    return _scales(zeros) if zeros.is_floating_point() else zeros


def grouping(group_size: int, block_k: int, pack: int) -> str:
    """How scales meet a tile of ``block_k`` codes: one per ``tile``, per ``unit`` of ``pack`` codes, or ``code``."""
    if group_size % block_k == 0:
        return "tile"
    return "unit" if group_size % pack == 0 else "code"
