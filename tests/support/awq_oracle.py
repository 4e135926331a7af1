"""AWQ's packings by their definition, one code at a time: independent of the package's packers."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def _signed(words: np.ndarray, bits: int) -> np.ndarray:
    return words.astype(np.uint64).astype(np.dtype(f"uint{bits}")).view(np.dtype(f"int{bits}"))


def gemm_words(codes: np.ndarray) -> Tensor:
    """codes [R, C] to int32 [R, C / 8]: nibble i of word c holds column 8 c + ORDER[i]."""
    words = np.zeros((codes.shape[0], codes.shape[1] // 8), dtype=np.uint64)
    for word in range(words.shape[1]):
        for nibble, column in enumerate(ORDER):
            words[:, word] |= codes[:, 8 * word + column].astype(np.uint64) << np.uint64(4 * nibble)
    return torch.from_numpy(_signed(words, 32))


def plain_words(codes: np.ndarray, num_words: int) -> Tensor:
    """codes [R, C] to int32 [R, num_words], in order and padded with zeros."""
    words = np.zeros((codes.shape[0], num_words), dtype=np.uint64)
    for column in range(codes.shape[1]):
        words[:, column // 8] |= codes[:, column].astype(np.uint64) << np.uint64(4 * (column % 8))
    return torch.from_numpy(_signed(words, 32))


def fast_words(codes: np.ndarray) -> Tensor:
    """codes [N, K] to int16 [N / 4, K]."""
    rows, columns = codes.shape
    words = np.zeros((rows // 4, columns), dtype=np.uint64)
    for n in range(rows):
        for k in range(columns):
            i, j, p = k % 32 // 8, k % 8 // 2, k % 2
            permuted = k // 32 * 32 + 8 * j + 4 * p + i
            place = n % 4 * 64 + permuted % 64
            words[n // 4, permuted // 64 * 64 + place // 4] |= np.uint64(int(codes[n, k]) << (4 * (place % 4)))
    return torch.from_numpy(_signed(words, 16))


def encode(
    version: str, codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray, group_size: int
) -> dict[str, Tensor]:
    """Stored tensors of codes [N, K], zeros and scales [N, G]."""
    halves = torch.from_numpy(scales).to(torch.float16)
    if version == "gemm":
        return {"qweight": gemm_words(codes.T), "qzeros": gemm_words(zeros.T), "scales": halves.T.contiguous()}
    multiple = {128: 1, 64: 2, 32: 4}[group_size]
    width = math.ceil(math.ceil(zeros.shape[1] / 8) / multiple) * multiple
    padded = torch.nn.functional.pad(halves, (0, 8 * width - halves.shape[1]))
    if version == "gemv":
        return {
            "qweight": plain_words(codes, codes.shape[1] // 8),
            "qzeros": plain_words(zeros, width),
            "scales": padded,
        }
    products = -(padded * torch.nn.functional.pad(torch.from_numpy(zeros), (0, 8 * width - zeros.shape[1])).half())
    return {"qweight": fast_words(codes), "qzeros": products.T.contiguous(), "scales": padded.T.contiguous()}
