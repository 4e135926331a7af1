"""AMD Quark checkpoints (``quant_method: quark``).

fp8, int8     P.weight [N, K]; P.weight_scale [] or [N]; P.weight_zero_point; P.input_scale, P.input_zero_point []
int4, uint4   P.weight int32 [K, N / 8], eight columns to a word, in AWQ's order or in order; P.weight_scale [G, N];
              P.weight_zero_point int32 [G, N / 8]. int4 codes and zeros are two's complement.
fp4           P.weight uint8 [N, K / 2]; P.weight_scale uint8 [N, K / 32], e8m0
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...errors import CheckpointError
from ..canonical import CanonicalWeight, PackedWeight
from ..packing import pack, unpack
from ..scheme import Dense, Fp8, Int8, MicroScaled, Scheme, WeightOnly
from .awq_packing import unpack_interleaved
from .base import Format, TensorSource
from .compressed_tensors import micro_scaled_shape, read_micro_scaled
from .dense import load_dense
from .dtypes import is_stored_plain
from .quark_config import parse_quark_config
from .tensor_reading import block_of_scales, eight_bit_scheme, matrix_shape, read_blocks, read_eight_bit, refuse_dtype

_PARTS = ("weight", "weight_scale", "weight_zero_point", "input_scale", "input_zero_point")


class QuarkFormat(Format):
    """Each module by its own config or the global one; a weight that is stored in 16 bits is dense in any case."""

    name = "quark"
    marks = ("weight_scale",)

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.config = parse_quark_config(raw)

    def scheme(self, module: str) -> Scheme:
        return self.config.scheme(module)

    def tensor_names(self, module: str) -> tuple[str, ...]:
        return tuple(f"{module}.{part}" for part in _PARTS)

    def stored_scheme(self, source: TensorSource, module: str) -> tuple[Scheme, tuple[int, int]]:
        if is_stored_plain(source, module):
            return Dense(), matrix_shape(source, f"{module}.weight")
        scheme = self._declared(source, module)
        if isinstance(scheme, Int8 | Fp8):
            return eight_bit_scheme(source, module, scheme, f"{module}.weight_scale")
        if isinstance(scheme, MicroScaled):
            return scheme, micro_scaled_shape(source, module, scheme)
        return scheme, self._integer_shape(source, module, scheme)

    def _load(self, source: TensorSource, module: str, dtype: torch.dtype) -> CanonicalWeight:
        if is_stored_plain(source, module):
            return load_dense(source, module)
        scheme = self._declared(source, module)
        scale, zero = f"{module}.weight_scale", f"{module}.weight_zero_point"
        if isinstance(scheme, Int8 | Fp8):
            return read_eight_bit(source, module, scheme, scale, zero_name=zero)
        if isinstance(scheme, MicroScaled):
            return read_micro_scaled(source, module, scheme)
        return self._read_bytes(source, module) if scheme.bits == 8 else self._read_words(source, module, scheme)

    def _declared(self, source: TensorSource, module: str) -> Int8 | Fp8 | MicroScaled | WeightOnly:
        scheme = self.config.scheme(module)
        if isinstance(scheme, Int8 | Fp8 | MicroScaled | WeightOnly):
            return scheme
        name = f"{module}.weight"
        matrix_shape(source, name)
        raise CheckpointError(
            f"{name} in {source.location(name)} is stored quantized, but the config excludes {module}: nothing says "
            f"how to read it"
        )

    def _integer_shape(self, source: TensorSource, module: str, scheme: WeightOnly) -> tuple[int, int]:
        name = f"{module}.weight"
        rows, columns = matrix_shape(source, name)
        if scheme.bits == 8:
            refuse_dtype(source, name, torch.int8, str(scheme))
            return rows, columns
        shape = (columns * 8, rows)
        scales = matrix_shape(source, f"{module}.weight_scale")
        if source.dtype(name) is not torch.int32 or scales != (scheme.num_groups(rows), shape[0]):
            raise CheckpointError(
                f"{name} in {source.location(name)} is {source.dtype(name)} {[rows, columns]} with scales "
                f"{list(scales)}; they do not fit {scheme}"
            )
        return shape

    def _read_bytes(self, source: TensorSource, module: str) -> PackedWeight:
        """int8 weights without quantized activations, one scale per channel or for all."""
        shape = matrix_shape(source, f"{module}.weight")
        refuse_dtype(source, f"{module}.weight", torch.int8, "int8 weights")
        codes = source.get(f"{module}.weight")
        name, zero_name = f"{module}.weight_scale", f"{module}.weight_zero_point"
        block = block_of_scales(source, name, shape, (1, -1))
        scales = read_blocks(source, name, shape, block).expand(shape[0], 1).contiguous()
        zeros = None
        if source.has(zero_name):
            stored = read_blocks(source, zero_name, shape, block).to(torch.int16) + 128
            zeros = stored.to(torch.uint8).expand(shape[0], 1).contiguous() if bool((stored != 128).any()) else None
        packed = pack((codes.to(torch.int16) + 128).to(torch.uint8), 8)
        return PackedWeight(WeightOnly(8, -1, symmetric=zeros is None), shape, packed, scales, zeros)

    def _read_words(self, source: TensorSource, module: str, scheme: WeightOnly) -> PackedWeight:
        shape = self._integer_shape(source, module, scheme)
        signed = self._is_signed(module)
        codes = self._codes(source.get(f"{module}.weight"), signed).T
        zero_name, zeros = f"{module}.weight_zero_point", None
        if source.has(zero_name):
            zeros = self._codes(source.get(zero_name), signed).T.contiguous()
            zeros = None if bool((zeros == 8).all()) else zeros
        stored = WeightOnly(4, scheme.group_size, symmetric=zeros is None)
        scales = source.get(f"{module}.weight_scale").T.contiguous()
        return PackedWeight(stored, shape, pack(codes, 4), scales, zeros)

    def _codes(self, words: Tensor, signed: bool) -> Tensor:
        """Unsigned codes [R, N] of words [R, N / 8]; signed ones are raised by 8."""
        codes = unpack_interleaved(words) if self.config.interleaved else unpack(words, 4, words.shape[1] * 8)
        return codes ^ 8 if signed else codes

    def _is_signed(self, module: str) -> bool:
        return self.config.weight_dtype(module) == "int4"
