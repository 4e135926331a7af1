"""AWQ's orders of 4-bit codes within words."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..conversions import convert
from ..packing import pack, unpack

# Nibble i of a word holds column INTERLEAVED[i] of its eight; column j is in nibble POSITION[j].
INTERLEAVED = (0, 2, 4, 6, 1, 3, 5, 7)
POSITION = (0, 4, 1, 5, 2, 6, 3, 7)
# Widths in bits, and the low half of every pair of that width.
_HALVES = ((16, 0x0000FFFF), (8, 0x00FF00FF), (4, 0x0F0F0F0F))
# Words that are rearranged at once: what they pass through stays in the cache.
_CHUNK_WORDS = 1 << 17


def pack_interleaved(codes: Tensor) -> Tensor:
    """Codes [R, C], C a multiple of 8, to int32 [R, C / 8] in gemm order."""
    return pack(codes.unflatten(1, (-1, 8))[..., list(INTERLEAVED)].flatten(1), 4)


def unpack_interleaved(words: Tensor) -> Tensor:
    """int32 [R, C] in gemm order to codes uint8 [R, 8 C]."""
    nibbles = unpack(words, 4, words.shape[1] * 8).unflatten(1, (-1, 8))
    return nibbles[..., list(POSITION)].flatten(1)


def stream_of_interleaved(words: Tensor) -> Tensor:
    """int32 [K, C] in gemm order, K a multiple of 8, to int32 [K / 8, 8 C]: a stream along K for each column.

    Eight rows of a word are a square of 8 x 8 nibbles, which is transposed by halves of words, then of those, for all
    columns at once, without taking the words apart: a tenth of the time that codes in bytes would take. Compiled code
    takes a tenth of that again.
    """
    converted = convert("stream_of_interleaved", words)
    if converted is not None:
        return converted
    rows, columns = words.shape
    source = words.contiguous().numpy().view(np.uint32).reshape(rows // 8, 8, columns)
    result = np.empty((rows // 8, columns, 8), dtype=np.uint32)
    step = max(1, _CHUNK_WORDS // max(1, 8 * columns))
    for first in range(0, rows // 8, step):
        part = slice(first, first + step)
        lanes = [source[part, row] for row in range(8)]
        for width, mask in _HALVES:
            lanes = _swap_halves(lanes, width, mask)
        for nibble, lane in enumerate(lanes):
            result[part, :, INTERLEAVED[nibble]] = lane
    return torch.from_numpy(result.reshape(rows // 8, columns * 8).view(np.int32))


def _swap_halves(lanes: list[np.ndarray], width: int, mask: int) -> list[np.ndarray]:
    """Exchange the high runs of ``width`` bits of a lane with the low ones of the lane ``width / 4`` further on."""
    swapped, distance = list(lanes), width // 4
    shift, low, high = np.uint32(width), np.uint32(mask), np.uint32(mask << width)
    for index in range(8):
        if index & distance:
            continue
        upper, lower = lanes[index], lanes[index + distance]
        swapped[index] = (upper & low) | ((lower & low) << shift)
        swapped[index + distance] = ((upper >> shift) & low) | (lower & high)
    return swapped


def unpack_gemv_fast(words: Tensor) -> Tensor:
    """int16 [N / 4, K] of the gemv_fast packing (llm-awq's version 2) to codes uint8 [N, K].

    The four nibbles of a word are neighbouring entries of one row; four rows alternate, 64 entries each. Within a run
    of 32, entry ``8 j + e`` is input feature ``8 i + 2 j + p`` where e counts the pairs (i, p) in the order 0, 2, 4, 6,
    1, 3, 5, 7.
    """
    quarter, columns = words.shape
    shifts = torch.arange(0, 16, 4, dtype=torch.int32)
    nibbles = (words.to(torch.int32)[..., None] >> shifts) & 0xF
    rows = nibbles.reshape(quarter, columns // 64, 4, 64).transpose(1, 2).reshape(quarter * 4, columns)
    runs = rows.reshape(quarter * 4, columns // 32, 4, 2, 4)  # [N, K/32, j, p, i]
    return runs.permute(0, 1, 4, 2, 3).reshape(quarter * 4, columns).to(torch.uint8)
