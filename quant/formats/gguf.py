"""GGUF tensors as they are stored: blocks of a row, each with its scale, brought into the canonical layout.

Kept quantized are the types whose dequantization is an integer times a scale (Q4_0, Q5_0, Q8_0, Q6_K) or that plus an
offset (Q4_1, Q5_1, Q4_K, Q5_K), at the width that kernels read: 5 and 6 bits become 8. The weights are those of
llama.cpp's dequantization bit for bit: products of a scale and a code are exact in float32. All other types are read
as float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, TypeGuard

import torch
from torch import Tensor

from ..canonical import CanonicalWeight, PackedWeight
from ..packing import num_words
from ..scheme import Dense, Offset, Scheme, WeightOnly
from .base import Format, TensorSource
from .dense import load_dense
from .gguf_blocks import BLOCKS, BlockType
from .tensor_reading import matrix_shape


class BlockSource(TensorSource, Protocol):
    """A checkpoint that can give a tensor's blocks instead of its values."""

    def block_type(self, name: str) -> str:
        """GGUF's name of the type that the tensor is stored in."""
        ...

    def block_rows(self, name: str) -> Iterator[tuple[int, Tensor]]:
        """(first row, uint8 [rows, bytes of a row]) until all were read; it counts as taken."""
        ...


def gives_blocks(source: TensorSource | None) -> TypeGuard[BlockSource]:
    """Whether a checkpoint is a GGUF file."""
    return hasattr(source, "block_rows")


class GgufFormat(Format):
    """What is stored decides, module by module; the file has no quantization config."""

    name = "gguf"

    def scheme(self, module: str) -> Scheme:
        return Dense()

    def tensor_names(self, module: str) -> tuple[str, ...]:
        return (f"{module}.weight",)

    def stored_scheme(self, source: TensorSource, module: str) -> tuple[Scheme, tuple[int, int]]:
        shape = matrix_shape(source, f"{module}.weight")
        kept = self._kept(source, module)
        return (Dense() if kept is None else _scheme(kept, shape[1])), shape

    def quantized_modules(self, source: TensorSource) -> list[str]:
        modules = (name.removesuffix(".weight") for name in source.names if name.endswith(".weight"))
        return sorted(module for module in modules if self._kept(source, module) is not None)

    def plain_tensor(self, source: TensorSource, module: str) -> str | None:
        return None if self._kept(source, module) is not None else super().plain_tensor(source, module)

    def packed_embedding(self, source: TensorSource, module: str) -> PackedWeight | None:
        return None if self._kept(source, module) is None else self._packed(source, module)

    def scale_bytes(self, source: TensorSource, module: str) -> int:
        """Bytes of one scale in the canonical layout."""
        kept = self._kept(source, module)
        return 4 if kept is None else kept.scale_dtype.itemsize

    def _load(self, source: TensorSource, module: str, dtype: torch.dtype) -> CanonicalWeight:
        return load_dense(source, module) if self._kept(source, module) is None else self._packed(source, module)

    def _packed(self, source: TensorSource, module: str) -> PackedWeight:
        """A few rows at a time: unpacked, they take more than either form."""
        assert gives_blocks(source), "only a GGUF file has blocks"
        name = f"{module}.weight"
        kept, (rows, columns) = BLOCKS[source.block_type(name)], matrix_shape(source, name)
        scheme, groups = _scheme(kept, columns), columns // kept.group_size
        words = torch.empty((rows, num_words(columns, kept.bits)), dtype=torch.int32)
        scales = torch.empty((rows, groups), dtype=kept.scale_dtype)
        offsets = torch.empty_like(scales) if kept.has_offsets else None
        for first, stored in source.block_rows(name):
            parts, some = kept.read(stored.reshape(-1, kept.block_bytes)), slice(first, first + stored.shape[0])
            words[some] = parts.codes.reshape(stored.shape[0], -1).view(torch.int32)
            scales[some] = parts.scales.reshape(-1, groups)
            if offsets is not None and parts.offsets is not None:
                offsets[some] = parts.offsets.reshape(-1, groups)
        return PackedWeight(scheme, (rows, columns), words, scales, offsets)

    def _kept(self, source: TensorSource, module: str) -> BlockType | None:
        """How a module's matrix stays quantized; None: it is read as float32."""
        name = f"{module}.weight"
        if not gives_blocks(source) or not source.has(name) or len(source.shape(name)) != 2:
            return None
        return BLOCKS.get(source.block_type(name))


def _scheme(kept: BlockType, columns: int) -> WeightOnly | Offset:
    kind = Offset if kept.has_offsets else WeightOnly
    return kind(kept.bits, -1 if kept.group_size == columns else kept.group_size, symmetric=not kept.has_offsets)
