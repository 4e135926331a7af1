"""Blocks of GGUF's types, to codes, scales and offsets of the canonical layout.

A block is a run of 32 or 256 weights of one row; numbers are little-endian, d, m and dmin float16. Lower nibbles of a
run of bytes are its first half of weights, upper nibbles the second; qh has the fifth (or fifth and sixth) bits.

Q4_0  d, 16 bytes: (q - 8) d                        Q4_1  d, m, 16 bytes: q d + m
Q5_0  d, qh uint32, 16 bytes: (q - 16) d            Q5_1  d, m, qh uint32, 16 bytes: q d + m
Q8_0  d, 32 int8: q d
Q4_K  d, dmin, 12 bytes (eight scales and eight minima of 6 bits), 128 bytes: q (d scale) - dmin min
Q5_K  the same with qh [32] before the 128 bytes
Q6_K  ql [128], qh [64], 16 int8 scales, d: (q - 32) (d scale)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# What is added to signed codes: the canonical zero of 8 bits is 128.
_MIDDLE = 128


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """Of B blocks: ``codes`` uint8 [B, bytes], a little-endian stream; ``scales`` and ``offsets`` [B, G] or None."""

    codes: Tensor
    scales: Tensor
    offsets: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class BlockType:
    """``read`` takes blocks uint8 [B, ``block_bytes``]; ``bits`` and ``group_size`` are those of the result."""

    block_bytes: int
    bits: int
    group_size: int
    has_offsets: bool
    read: Callable[[Tensor], Parts]
    scale_dtype: torch.dtype = torch.float16


def _q4_0(blocks: Tensor) -> Parts:
    return Parts(_paired(blocks[:, 2:]), _halves(blocks, 0))


def _q4_1(blocks: Tensor) -> Parts:
    return Parts(_paired(blocks[:, 4:]), _halves(blocks, 0), _halves(blocks, 2))


def _q5_0(blocks: Tensor) -> Parts:
    return Parts(_five_bits(blocks[:, 2:]) + (_MIDDLE - 16), _halves(blocks, 0))


def _q5_1(blocks: Tensor) -> Parts:
    return Parts(_five_bits(blocks[:, 4:]), _halves(blocks, 0), _halves(blocks, 2))


def _q8_0(blocks: Tensor) -> Parts:
    return Parts(blocks[:, 2:] ^ _MIDDLE, _halves(blocks, 0))


def _q4_k(blocks: Tensor) -> Parts:
    scales, offsets = _scales_and_minima(blocks)
    return Parts(_paired(blocks[:, 16:].reshape(-1, 32)).reshape(-1, 128), scales, offsets)


def _q5_k(blocks: Tensor) -> Parts:
    scales, offsets = _scales_and_minima(blocks)
    high = blocks[:, None, 16:48] >> _shifts(range(8), blocks)[:, None] & 1
    codes = _split(blocks[:, 48:].reshape(-1, 32)).reshape(-1, 8, 32) | high << 4
    return Parts(codes.reshape(-1, 256), scales, offsets)


def _q6_k(blocks: Tensor) -> Parts:
    low = blocks[:, :128].reshape(-1, 2, 64)  # 64 bytes for each half of the weights
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> _shifts((0, 2, 4, 6), blocks)[:, None] & 3
    codes = torch.cat((low & 15, low >> 4), dim=2).reshape(-1, 2, 4, 32) | high << 4
    scales = blocks[:, 192:208].view(torch.int8).float() * _halves(blocks, 208).float()
    return Parts(codes.reshape(-1, 256) + (_MIDDLE - 32), scales)


BLOCKS = {
    "Q4_0": BlockType(18, 4, 32, False, _q4_0),
    "Q4_1": BlockType(20, 4, 32, True, _q4_1),
    "Q5_0": BlockType(22, 8, 32, False, _q5_0),
    "Q5_1": BlockType(24, 8, 32, True, _q5_1),
    "Q8_0": BlockType(34, 8, 32, False, _q8_0),
    "Q4_K": BlockType(144, 4, 32, True, _q4_k, torch.float32),
    "Q5_K": BlockType(176, 8, 32, True, _q5_k, torch.float32),
    "Q6_K": BlockType(210, 8, 16, False, _q6_k, torch.float32),
}


def _halves(blocks: Tensor, start: int) -> Tensor:
    """The float16 at byte ``start`` of each block, [B, 1]."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16)


def _split(nibbles: Tensor) -> Tensor:
    """[B, n] bytes to [B, 2 n] codes: all lower nibbles, then all upper ones."""
    return torch.cat((nibbles & 15, nibbles >> 4), dim=1)


def _paired(nibbles: Tensor) -> Tensor:
    """The same codes as a stream of nibbles, [B, n]: neighbours share a byte."""
    codes = _split(nibbles)
    return codes[:, ::2] | codes[:, 1::2] << 4


def _five_bits(blocks: Tensor) -> Tensor:
    """qh and nibbles [B, 20] to codes [B, 32]."""
    high = blocks[:, :4, None] >> _shifts(range(8), blocks) & 1
    return _split(blocks[:, 4:]) | high.reshape(-1, 32) << 4


def _scales_and_minima(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """float32 scales and offsets [B, 8] of Q4_K and Q5_K; the upper four's high bits lie above the lower four's."""
    packed = blocks[:, 4:16].reshape(-1, 3, 4)
    first, second, third = packed.unbind(dim=1)
    scales = torch.cat((first & 63, third & 15 | first >> 6 << 4), dim=1)
    minima = torch.cat((second & 63, third >> 4 | second >> 6 << 4), dim=1)
    return scales.float() * _halves(blocks, 0).float(), -(minima.float() * _halves(blocks, 2).float())


def _shifts(shifts: range | tuple[int, ...], blocks: Tensor) -> Tensor:
    return torch.tensor(list(shifts), dtype=torch.uint8, device=blocks.device)
