"""AWQ's orders of 4-bit codes within words."""

from __future__ import annotations

import torch
from torch import Tensor

from ..packing import pack, unpack

# Nibble i of a word holds column INTERLEAVED[i] of its eight; column j is in nibble POSITION[j].
INTERLEAVED = (0, 2, 4, 6, 1, 3, 5, 7)
POSITION = (0, 4, 1, 5, 2, 6, 3, 7)


def pack_interleaved(codes: Tensor) -> Tensor:
    """Codes [R, C], C a multiple of 8, to int32 [R, C / 8] in gemm order."""
    return pack(codes.unflatten(1, (-1, 8))[..., list(INTERLEAVED)].flatten(1), 4)


def unpack_interleaved(words: Tensor) -> Tensor:
    """int32 [R, C] in gemm order to codes uint8 [R, 8 C]."""
    nibbles = unpack(words, 4, words.shape[1] * 8).unflatten(1, (-1, 8))
    return nibbles[..., list(POSITION)].flatten(1)


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
