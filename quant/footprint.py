"""How many bytes a weight takes in the canonical layout, computed from scheme and shape instead of from tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from .packing import num_words
from .scheme import Dense, Element, Fp8, Int8, LowBit, MicroScaled, Offset, Scheme, WeightOnly


@dataclass(frozen=True, slots=True)
class StoredLinear:
    """One matrix (N, K) that was not read.

    ``scale_bytes``   of one element: of the matrix itself where it is dense, else of a scale.
    ``divisor_bytes`` of NVFP4's global scales, 0 in other schemes.
    """

    scheme: Scheme
    shape: tuple[int, int]
    scale_bytes: int
    divisor_bytes: int = 0

    @property
    def nbytes(self) -> int:
        """What ``CanonicalWeight.nbytes`` will be."""
        scheme, (rows, columns) = self.scheme, self.shape
        if isinstance(scheme, Dense):
            return rows * columns * self.scale_bytes
        if isinstance(scheme, WeightOnly | Offset | LowBit):
            return self._packed(scheme)
        if isinstance(scheme, Int8 | Fp8):
            zeros = isinstance(scheme, Int8) and not scheme.symmetric
            return rows * columns + math.prod(scheme.num_blocks(self.shape)) * (self.scale_bytes + zeros)
        codes = -(-columns // 2) if scheme.element is Element.FP4 else columns
        return rows * (codes + -(-columns // scheme.group_size)) + self.divisor_bytes

    def _packed(self, scheme: WeightOnly | Offset | LowBit) -> int:
        rows, columns = self.shape
        zero_bytes = 0 if scheme.symmetric else self.scale_bytes if isinstance(scheme, Offset) else 1
        groups = rows * scheme.num_groups(columns) * (self.scale_bytes + zero_bytes)
        return rows * num_words(columns, scheme.bits) * 4 + groups + (4 * columns if scheme.act_order else 0)


def merge_stored(parts: list[StoredLinear]) -> list[StoredLinear]:
    """What ``canonical.merge`` makes of such weights.

    Where that depends on values, the usual ones are assumed: equal gathers and input scales, unequal scales per tensor.
    """
    first = parts[0]
    if len(parts) == 1 or not all(_alike(first, part) for part in parts):
        return parts
    rows, scheme = sum(part.shape[0] for part in parts), first.scheme
    if isinstance(scheme, Int8 | Fp8):
        scheme = replace(scheme, block=(_common_rows(parts), scheme.block[1]))
    divisor = 4 * rows if first.divisor_bytes else 0
    return [replace(first, scheme=scheme, shape=(rows, first.shape[1]), divisor_bytes=divisor)]


def _alike(a: StoredLinear, b: StoredLinear) -> bool:
    if a.shape[1] != b.shape[1]:
        return False
    if isinstance(a.scheme, Int8 | Fp8) and type(a.scheme) is type(b.scheme):
        rows_aside = replace(a.scheme, block=(b.scheme.block[0], a.scheme.block[1]))  # type: ignore[union-attr]
        return rows_aside == b.scheme and a.scale_bytes == b.scale_bytes
    same_scales = isinstance(a.scheme, Dense | MicroScaled) or a.scale_bytes == b.scale_bytes
    return a.scheme == b.scheme and same_scales


def _common_rows(parts: list[StoredLinear]) -> int:
    sizes = [part.scheme.resolved_block(part.shape)[0] for part in parts if isinstance(part.scheme, Int8 | Fp8)]
    if all(part.scheme.block[0] == -1 for part in parts if isinstance(part.scheme, Int8 | Fp8)):
        return 1
    return math.gcd(*sizes, *(part.shape[0] for part in parts[:-1]))
