"""The canonical layout: one in-memory form per scheme, whatever tool wrote the checkpoint.

GPTQ, AWQ and compressed-tensors weights of the same scheme end in the same ``PackedWeight`` and so in the same kernel.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .packing import num_words, pack, unpack
from .scheme import Dense, Scheme, WeightOnly

__all__ = ["CanonicalWeight", "DenseWeight", "PackedWeight", "dequantize", "merge", "pack", "unpack"]


@dataclass(frozen=True, slots=True, eq=False)
class DenseWeight:
    """A plain matrix ``weight`` [N, K]."""

    weight: Tensor

    @property
    def scheme(self) -> Scheme:
        return Dense()

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.weight.shape[0], self.weight.shape[1]

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """Integer weights, groups contiguous along K.

    ``shape``    (N, K).
    ``qweight``  int32 [N, ceil(K * bits / 32)]: unsigned codes as a little-endian bit stream along K (``packing.py``).
    ``scales``   [N, G] in the checkpoint's floating-point type; they may be negative.
    ``zeros``    uint8 [N, G], or None: every zero is ``2 ** (bits - 1)``.
    ``perm``     int32 [K] or None. Packed column j belongs to input feature ``perm[j]``: y = x[:, perm] @ W_packed.T.
    Packed column j is in group ``j // group_size``; the last group may be short.
    """

    scheme: WeightOnly
    shape: tuple[int, int]
    qweight: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    perm: Tensor | None = None

    def __post_init__(self) -> None:
        (rows, columns), groups = self.shape, self.num_groups
        assert self.qweight.shape == (rows, num_words(columns, self.scheme.bits)), "qweight does not fit the shape"
        assert self.scales.shape == (rows, groups), "scales do not fit the shape"
        assert self.zeros is None or self.zeros.shape == (rows, groups), "zeros do not fit the shape"
        assert (self.zeros is None) == self.scheme.symmetric, "zeros are stored exactly for asymmetric schemes"
        assert (self.perm is not None) == self.scheme.act_order, "perm is stored exactly for act-order schemes"

    @property
    def group_size(self) -> int:
        """Input features per group, always positive."""
        return self.scheme.resolved_group_size(self.shape[1])

    @property
    def num_groups(self) -> int:
        """G."""
        return self.scheme.num_groups(self.shape[1])

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self.qweight, self.scales, self.zeros, self.perm) if t is not None)


CanonicalWeight = DenseWeight | PackedWeight


def dequantize(weight: CanonicalWeight, dtype: torch.dtype = torch.float32) -> Tensor:
    """The matrix [N, K] that a weight stands for, columns in the order of the input features."""
    if isinstance(weight, DenseWeight):
        return weight.weight.to(dtype)
    columns = weight.shape[1]
    codes = unpack(weight.qweight, weight.scheme.bits, columns).to(torch.float32)
    codes -= _per_column(_zeros(weight), weight.group_size, columns)
    codes *= _per_column(weight.scales.to(torch.float32), weight.group_size, columns)
    if weight.perm is None:
        return codes.to(dtype)
    restored = torch.empty_like(codes, dtype=dtype)
    restored[:, weight.perm.long()] = codes.to(dtype)
    return restored


def merge(parts: list[CanonicalWeight]) -> list[CanonicalWeight]:
    """One weight stacking ``parts`` along N where they can share a matrix, else the parts unchanged."""
    first = parts[0]
    if len(parts) == 1:
        return parts
    if all(isinstance(part, DenseWeight) for part in parts):
        same = all(part.shape[1] == first.shape[1] for part in parts)
        return [DenseWeight(torch.cat([dequantize(part, _dense_dtype(first)) for part in parts]))] if same else parts
    packed = [part for part in parts if isinstance(part, PackedWeight)]
    if len(packed) != len(parts) or not all(_mergeable(packed[0], part) for part in packed):
        return parts
    return [_stack(packed)]


def _dense_dtype(weight: CanonicalWeight) -> torch.dtype:
    assert isinstance(weight, DenseWeight)
    return weight.weight.dtype


def _mergeable(a: PackedWeight, b: PackedWeight) -> bool:
    if a.scheme != b.scheme or a.shape[1] != b.shape[1] or a.scales.dtype != b.scales.dtype:
        return False
    return a.perm is None or (b.perm is not None and torch.equal(a.perm, b.perm))


def _stack(parts: list[PackedWeight]) -> PackedWeight:
    zeros = [part.zeros for part in parts if part.zeros is not None]
    return replace(
        parts[0],
        shape=(sum(part.shape[0] for part in parts), parts[0].shape[1]),
        qweight=torch.cat([part.qweight for part in parts]),
        scales=torch.cat([part.scales for part in parts]),
        zeros=torch.cat(zeros) if zeros else None,
    )


def _zeros(weight: PackedWeight) -> Tensor:
    if weight.zeros is None:
        return torch.full_like(weight.scales, 2 ** (weight.scheme.bits - 1), dtype=torch.float32)
    return weight.zeros.to(torch.float32)


def _per_column(values: Tensor, group_size: int, columns: int) -> Tensor:
    """Spread one value per group [N, G] over the columns [N, K]; one group broadcasts."""
    if values.shape[1] == 1:
        return values
    return values.repeat_interleave(group_size, dim=1)[:, :columns]
