"""GPTQ by its definition, in whole numbers: independent of the package's packers, slow and plain."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def stream_bits(words: list[int]) -> int:
    """int32 words as one little-endian whole number."""
    return sum((word & 0xFFFFFFFF) << (32 * index) for index, word in enumerate(words))


def read_stream(words: list[int], bits: int, count: int) -> list[int]:
    stream = stream_bits(words)
    return [(stream >> (index * bits)) & ((1 << bits) - 1) for index in range(count)]


def write_stream(codes: list[int], bits: int) -> list[int]:
    stream = sum(code << (index * bits) for index, code in enumerate(codes))
    words = [(stream >> (32 * index)) & 0xFFFFFFFF for index in range(-(-len(codes) * bits // 32))]
    return [word - (1 << 32) if word >= 1 << 31 else word for word in words]


def encode_linear(
    codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray, g_idx: np.ndarray | None, bits: int, version: int
) -> dict[str, Tensor]:
    """codes [K, N], zeros and scales [G, N] to the stored tensors; every stored zero must fit."""
    columns = [write_stream(codes[:, n].tolist(), bits) for n in range(codes.shape[1])]
    rows = [write_stream((row - (2 - version)).tolist(), bits) for row in zeros.astype(np.int64)]
    tensors = {
        "qweight": torch.tensor(columns, dtype=torch.int32).T.contiguous(),
        "qzeros": torch.tensor(rows, dtype=torch.int32),
        "scales": torch.from_numpy(scales).to(torch.float16),
    }
    if g_idx is not None:
        tensors["g_idx"] = torch.from_numpy(g_idx).to(torch.int32)
    return tensors


def read_streams(words: Tensor, bits: int, count: int) -> np.ndarray:
    """``read_stream`` of each row of int32 words [R, W], bit by bit with numpy: [R, count]."""
    spread = np.unpackbits(words.contiguous().numpy().view(np.uint8), axis=1, bitorder="little")
    fields = spread[:, : count * bits].reshape(len(spread), count, bits)
    return sum(fields[:, :, bit].astype(np.int16) << bit for bit in range(bits))


def decode_linear(tensors: dict[str, Tensor], bits: int, version: int) -> np.ndarray:
    """The matrix W [N, K] in float64 that stored tensors stand for, one zero per field."""
    columns, rows = tensors["g_idx"].numel(), tensors["scales"].shape[1]
    codes = read_streams(tensors["qweight"].T, bits, columns)
    stored = read_streams(tensors["qzeros"], bits, rows)
    zeros = (stored + (2 - version)) % (1 << bits)
    scales = tensors["scales"].double().numpy()
    group = tensors["g_idx"].numpy()
    return (codes - zeros[group].T) * scales[group].T
