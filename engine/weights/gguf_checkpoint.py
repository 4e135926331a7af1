"""A GGUF file seen as a checkpoint with Hugging Face names: values in float32, or the stored blocks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .checkpoint import Checkpoint
from .file_pages import rows_at_once
from .gguf_file import open_gguf
from .gguf_names import hf_name

# Tensors that hold no parameter: the config already says what they say.
DERIVED = frozenset({"rope_freqs.weight"})
# Of blocks that are handed out at once.
CHUNK_BYTES = 1 << 20


class GgufCheckpoint(Checkpoint):
    """Dequantizes on reading. Tensors without a Hugging Face name keep their own and show up as unused."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._file = open_gguf(path)
        stored = [name for name in self._file.tensors if name not in DERIVED]
        self._stored_name = {hf_name(name) or name: name for name in stored}
        self._names = frozenset(self._stored_name)

    @property
    def names(self) -> frozenset[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file.shape(self._stored_name[name])

    def dtype(self, name: str) -> torch.dtype:
        return torch.float32

    def location(self, name: str) -> str:
        return str(self.path)

    def _read(self, name: str) -> Tensor:
        stored = self._stored_name[name]
        data = self._file.read(stored)
        num_heads = self._permuted_heads(stored)
        self._file.let_go(stored, 0, len(self._file.tensors[stored].data))
        return torch.from_numpy(unpermute(data, num_heads) if num_heads else data)

    def rows(self, name: str) -> Iterator[tuple[int, Tensor]]:
        stored = self._stored_name.get(name)
        if stored is None or self._permuted_heads(stored) or len(self.shape(name)) < 2:
            yield from super().rows(name)
            return
        self.taken.add(name)
        for first, end in self._chunks(stored):
            yield first, torch.from_numpy(self._file.read(stored, slice(first, end)))
            self._file.let_go(stored, first, end)

    def block_type(self, name: str) -> str:
        """GGUF's name of the type that a tensor is stored in: F32, Q4_1 ..."""
        return self._file.tensors[self._stored_name[name]].tensor_type.name

    def block_rows(self, name: str) -> Iterator[tuple[int, Tensor]]:
        """(first row, uint8 [rows, bytes of a row]) of a quantized matrix, a few rows at a time, in Hugging Face's
        order."""
        self.taken.add(name)
        stored = self._stored_name[name]
        data, num_heads = self._file.tensors[stored].data, self._permuted_heads(stored)
        data = unpermute(data, num_heads) if num_heads else data
        for first, end in self._chunks(stored):
            yield first, torch.from_numpy(np.array(data[first:end]))
            self._file.let_go(stored, first, end)

    def let_go(self) -> None:
        self._file.let_go_all()

    def _chunks(self, stored: str) -> Iterator[tuple[int, int]]:
        """Runs of rows of about ``CHUNK_BYTES`` in the file."""
        tensor = self._file.tensors[stored]
        num_rows = len(tensor.data)
        step = rows_at_once(CHUNK_BYTES, tensor.n_bytes // max(num_rows, 1))
        for first in range(0, num_rows, step):
            yield first, min(first + step, num_rows)

    def _permuted_heads(self, stored: str) -> int | None:
        """Heads of a tensor whose rows llama.cpp permuted: only q and k of the llama architecture."""
        if self._file.architecture != "llama":
            return None
        if ".attn_q." in stored:
            return int(self._file.require("llama.attention.head_count"))
        if ".attn_k." in stored:
            heads = self._file.require("llama.attention.head_count")
            return int(self._file.value("llama.attention.head_count_kv", heads))
        return None


def unpermute(data: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo llama.cpp's row order for rotary embedding.

    Within each head of D rows, Hugging Face pairs row i with row i + D/2; llama.cpp's files interleave the two halves,
    so that a pair lies in neighbouring rows.
    """
    half = data.shape[0] // num_heads // 2
    heads = data.reshape(num_heads, half, 2, *data.shape[1:])
    return np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(data.shape)
