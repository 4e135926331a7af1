"""Some rows of a weight as a weight of its own: what is read or expanded a few megabytes at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from .canonical import CanonicalWeight, DenseWeight, PackedWeight
from .eight_bit import EightBitWeight


def row_chunks(weight: CanonicalWeight, num_elements: int) -> Iterator[tuple[int, CanonicalWeight]]:
    """(first row, weight of the rows from there on), each of about ``num_elements`` elements or one block of rows."""
    rows, columns = weight.shape
    unit = 1
    if isinstance(weight, EightBitWeight) and weight.scheme.block[0] > 1:
        unit = weight.scheme.block[0]
    step = max(1, num_elements // max(1, columns) // unit) * unit
    for first in range(0, rows, step):
        yield first, rows_of(weight, first, min(first + step, rows))


def rows_of(weight: CanonicalWeight, first: int, last: int) -> CanonicalWeight:
    """Views of rows ``first`` to ``last``; where blocks span several rows, ``first`` begins one."""
    count = last - first
    if isinstance(weight, DenseWeight):
        return DenseWeight(weight.weight[first:last])
    shape = (count, weight.shape[1])
    if isinstance(weight, PackedWeight):
        zeros = None if weight.zeros is None else weight.zeros[first:last]
        return replace(
            weight, shape=shape, qweight=weight.qweight[first:last], scales=weight.scales[first:last], zeros=zeros
        )
    if isinstance(weight, EightBitWeight):
        block = weight.scheme.block[0]
        assert block == -1 or first % block == 0, f"row {first} begins no block of {block}"
        rows = slice(None) if block == -1 else slice(first // block, -(-last // block))
        zeros = None if weight.zeros is None else weight.zeros[rows]
        return replace(weight, codes=weight.codes[first:last], scales=weight.scales[rows], zeros=zeros)
    divisor = weight.divisor
    if divisor is not None and divisor.shape[0] > 1:
        divisor = divisor[first:last]
    return replace(
        weight, shape=shape, codes=weight.codes[first:last], scales=weight.scales[first:last], divisor=divisor
    )
