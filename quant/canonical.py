"""The canonical layout: one in-memory form per scheme, whatever tool wrote the checkpoint.

GPTQ, AWQ and compressed-tensors weights of the same scheme end in the same ``PackedWeight`` and so in the same kernel.
Weights keep their stored width here, 4 or 8 bits; a kernel may expand them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .eight_bit import EightBitWeight, int8_as_packed_fields, same_input, stack_eight_bit
from .micro_scaled import MicroScaledWeight, stack_micro_scaled
from .packing import num_words, pack, unpack
from .scheme import Dense, Int8, LowBit, Offset, Scheme, WeightOnly
from .stacking import stack_rows

__all__ = [
    "CanonicalWeight",
    "DenseWeight",
    "EightBitWeight",
    "MicroScaledWeight",
    "PackedWeight",
    "dequantize",
    "int8_as_packed",
    "merge",
    "pack",
    "unpack",
]


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
    ``zeros``    uint8 [N, G], or None: every zero is ``2 ** (bits - 1)``. ``Offset``: offsets in the scales' dtype.
    ``perm``     int32 [K] or None. Packed column j belongs to input feature ``perm[j]``: y = x[:, perm] @ W_packed.T.
    ``input_scale``, ``input_zero``  float32 scalars for static activations (``LowBit``), or None.
    Packed column j is in group ``j // group_size``; the last group may be short.
    """

    scheme: WeightOnly | Offset | LowBit
    shape: tuple[int, int]
    qweight: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    perm: Tensor | None = None
    input_scale: Tensor | None = None
    input_zero: Tensor | None = None

    def __post_init__(self) -> None:
        (rows, columns), groups = self.shape, self.num_groups
        assert self.qweight.shape == (rows, num_words(columns, self.scheme.bits)), "qweight does not fit the shape"
        assert self.scales.shape == (rows, groups), "scales do not fit the shape"
        assert self.zeros is None or self.zeros.shape == (rows, groups), "zeros do not fit the shape"
        assert self.zeros is None or not isinstance(self.scheme, Offset) or self.zeros.dtype is self.scales.dtype
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


CanonicalWeight = DenseWeight | PackedWeight | EightBitWeight | MicroScaledWeight


def dequantize(weight: CanonicalWeight, dtype: torch.dtype = torch.float32) -> Tensor:
    """The matrix [N, K] that a weight stands for, columns in the order of the input features."""
    if isinstance(weight, DenseWeight):
        return weight.weight.to(dtype)
    if not isinstance(weight, PackedWeight):
        return weight.dequantize().to(dtype)
    columns = weight.shape[1]
    codes = unpack(weight.qweight, weight.scheme.bits, columns).to(torch.float32)
    zeros = _per_column(_zeros(weight), weight.group_size, columns)
    scales = _per_column(weight.scales.to(torch.float32), weight.group_size, columns)
    if isinstance(weight.scheme, Offset):
        codes = codes.mul_(scales).add_(zeros)
    else:
        codes = codes.sub_(zeros).mul_(scales)
    if weight.perm is None:
        return codes.to(dtype)
    restored = torch.empty_like(codes, dtype=dtype)
    restored[:, weight.perm.long()] = codes.to(dtype)
    return restored


def merge(parts: list[CanonicalWeight]) -> list[CanonicalWeight]:
    """One weight stacking ``parts`` along N where they can share a matrix, else the parts unchanged.

    Parts keep their own scales. Parts whose static input scales differ do not share a matrix: a common one would round
    the input of one of them on another's grid.
    """
    if len(parts) == 1:
        return parts
    kind = type(parts[0])
    merged = _STACKS[kind](parts) if all(type(part) is kind for part in parts) else None
    return parts if merged is None else [merged]


def int8_as_packed(weight: EightBitWeight) -> PackedWeight:
    """int8 codes as unsigned 8-bit ones around 128, one scale per output feature and group."""
    assert isinstance(weight.scheme, Int8), f"{weight.scheme} has no integer codes"
    scheme, qweight, scales, zeros = int8_as_packed_fields(
        weight.codes, weight.scales, weight.zeros, weight.scheme.block
    )
    return PackedWeight(scheme, weight.shape, qweight, scales, zeros)


def _stack_dense(parts: list[DenseWeight]) -> DenseWeight | None:
    first = parts[0].weight
    if any(part.shape[1] != first.shape[1] for part in parts):
        return None
    return DenseWeight(stack_rows([part.weight.to(first.dtype) for part in parts]))


def _stack_packed(parts: list[PackedWeight]) -> PackedWeight | None:
    if not all(_mergeable(parts[0], part) for part in parts):
        return None
    zeros = [part.zeros for part in parts if part.zeros is not None]
    return replace(
        parts[0],
        shape=(sum(part.shape[0] for part in parts), parts[0].shape[1]),
        qweight=stack_rows([part.qweight for part in parts]),
        scales=stack_rows([part.scales for part in parts]),
        zeros=stack_rows(zeros) if zeros else None,
    )


def _mergeable(a: PackedWeight, b: PackedWeight) -> bool:
    if a.scheme != b.scheme or a.shape[1] != b.shape[1] or a.scales.dtype != b.scales.dtype:
        return False
    if not same_input((a.input_scale, a.input_zero), (b.input_scale, b.input_zero)):
        return False
    return a.perm is None or (b.perm is not None and torch.equal(a.perm, b.perm))


_STACKS: dict[type, Callable[[list[Any]], CanonicalWeight | None]] = {
    DenseWeight: _stack_dense,
    PackedWeight: _stack_packed,
    EightBitWeight: stack_eight_bit,
    MicroScaledWeight: stack_micro_scaled,
}


def _zeros(weight: PackedWeight) -> Tensor:
    if weight.zeros is None:
        return torch.full_like(weight.scales, 2 ** (weight.scheme.bits - 1), dtype=torch.float32)
    return weight.zeros.to(torch.float32)


def _per_column(values: Tensor, group_size: int, columns: int) -> Tensor:
    """Spread one value per group [N, G] over the columns [N, K]; one group broadcasts."""
    if values.shape[1] == 1:
        return values
    return values.repeat_interleave(group_size, dim=1)[:, :columns]
