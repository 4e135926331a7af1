"""Unsigned codes of 2 to 8 bits as a little-endian bit stream in int32 words.

Code i occupies bits ``[i * bits, (i + 1) * bits)`` of the stream; widths that do not divide 32 straddle words. GPTQ,
compressed-tensors and the canonical layout all use this one stream, along different axes.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def num_words(count: int, bits: int) -> int:
    """int32 words that hold ``count`` codes."""
    return -(-count * bits // 32)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes [..., C] (any integer type, 0 <= code < 2**bits) into int32 words [..., ceil(C * bits / 32)].

    Unused bits of the last word are zero.
    """
    count = codes.shape[-1]
    values = F.pad(codes.to(torch.uint8), (0, -count % 32))
    if bits in (2, 4, 8):
        packed = _pack_in_bytes(values, bits)
    else:
        packed = _pack_across_bytes(values, bits)
    words = packed.contiguous().view(torch.int32)
    return words[..., : num_words(count, bits)].contiguous()


def unpack(words: Tensor, bits: int, count: int) -> Tensor:
    """The first ``count`` codes of int32 words [..., W], as uint8 [..., count]. Inverse of ``pack``."""
    needed = num_words(count, bits)
    assert words.shape[-1] >= needed, f"{count} codes of {bits} bits need {needed} words, not {words.shape[-1]}"
    raw = words.contiguous().view(torch.uint8)
    if bits in (2, 4, 8):
        codes = _unpack_in_bytes(raw, bits)
    else:
        codes = _unpack_across_bytes(raw, bits)
    return codes[..., :count].contiguous()


def _pack_in_bytes(values: Tensor, bits: int) -> Tensor:
    per_byte = 8 // bits
    lanes = values.unflatten(-1, (-1, per_byte))
    packed = lanes[..., 0].clone()
    for lane in range(1, per_byte):
        packed |= lanes[..., lane] << (lane * bits)
    return packed


def _unpack_in_bytes(raw: Tensor, bits: int) -> Tensor:
    mask = (1 << bits) - 1
    lanes = [(raw >> shift) & mask for shift in range(0, 8, bits)]
    return torch.stack(lanes, dim=-1).flatten(-2)


def _pack_across_bytes(values: Tensor, bits: int) -> Tensor:
    """Eight codes fill exactly ``bits`` bytes, whatever the width."""
    lanes = values.unflatten(-1, (-1, 8)).to(torch.int64)
    joined = torch.zeros_like(lanes[..., 0])
    for lane in range(8):
        joined |= lanes[..., lane] << (lane * bits)
    parts = [((joined >> (8 * byte)) & 0xFF).to(torch.uint8) for byte in range(bits)]
    return torch.stack(parts, dim=-1).flatten(-2)


def _unpack_across_bytes(raw: Tensor, bits: int) -> Tensor:
    parts = F.pad(raw, (0, -raw.shape[-1] % bits)).unflatten(-1, (-1, bits)).to(torch.int64)
    joined = torch.zeros_like(parts[..., 0])
    for byte in range(bits):
        joined |= parts[..., byte] << (8 * byte)
    mask = (1 << bits) - 1
    lanes = [((joined >> (lane * bits)) & mask).to(torch.uint8) for lane in range(8)]
    return torch.stack(lanes, dim=-1).flatten(-2)
