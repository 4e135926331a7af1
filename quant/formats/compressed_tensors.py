"""compressed-tensors checkpoints, as llm-compressor writes them.

Per linear ``P`` of N output and K input features, G groups:

    pack-quantized        P.weight_packed int32 [N, ceil(K b / 32)], codes plus 2**(b-1); P.weight_scale [N, G];
                          P.weight_shape int64 [2]; P.weight_zero_point int32 [ceil(N b / 32), G] packed along N, or
                          int8 [N, G]; P.weight_g_idx int32 [K]
    int-, float-quantized P.weight int8 or float8_e4m3fn [N, K] (4-bit codes too take a byte each); P.weight_scale [],
                          [1], [N], [N, 1], [N, G] or one per block; P.weight_zero_point
    nvfp4, mxfp4          P.weight_packed uint8 [N, K / 2]; P.weight_scale [N, G] float8_e4m3fn or uint8 exponents;
                          NVFP4: P.weight_global_scale [1], which divides
    mxfp8                 P.weight float8_e4m3fn; P.weight_scale uint8 [N, G]
    static activations    P.input_scale, P.input_zero_point; NVFP4: P.input_global_scale
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...errors import CheckpointError
from ...log import get_logger
from ..canonical import CanonicalWeight, MicroScaledWeight, PackedWeight
from ..packing import num_words, pack, unpack
from ..scheme import Dense, Element, Fp8, Int8, LowBit, MicroScaled, Scheme, WeightOnly
from .base import Format, TensorSource
from .compressed_tensors_config import parse_compressed_tensors
from .dense import load_dense
from .dtypes import is_stored_plain
from .groups import contiguous_groups
from .missing import missing
from .tensor_reading import (
    block_of_scales,
    eight_bit_scheme,
    matrix_shape,
    needs_static,
    read_eight_bit,
    refuse_dtype,
    refuse_zeros,
    with_static_input,
)

log = get_logger(__name__)

_PARTS = (
    "weight",
    "weight_packed",
    "weight_scale",
    "weight_shape",
    "weight_zero_point",
    "weight_g_idx",
    "weight_global_scale",
    "input_scale",
    "input_zero_point",
    "input_global_scale",
)


class CompressedTensorsFormat(Format):
    """Each module by the scheme of its group; a weight that is stored in 16 bits is dense in any case."""

    name = "compressed-tensors"
    marks = ("weight_packed", "weight_scale")

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.config = parse_compressed_tensors(raw)

    def scheme(self, module: str) -> Scheme:
        return self.config.scheme(module)

    def tensor_names(self, module: str) -> tuple[str, ...]:
        return tuple(f"{module}.{part}" for part in _PARTS)

    def stored_scheme(self, source: TensorSource, module: str) -> tuple[Scheme, tuple[int, int]]:
        if is_stored_plain(source, module):
            return Dense(), matrix_shape(source, f"{module}.weight")
        scheme = self._declared(source, module)
        if isinstance(scheme, Int8 | Fp8):
            _require_zeros(source, module, scheme)
            return eight_bit_scheme(source, module, scheme, f"{module}.weight_scale")
        if isinstance(scheme, MicroScaled):
            needs_static(source, module, scheme.activation)
            return scheme, micro_scaled_shape(source, module, scheme)
        if isinstance(scheme, LowBit):
            needs_static(source, module, scheme.activation)
        return scheme, _Integers(source, module, scheme).shape

    def _load(self, source: TensorSource, module: str, dtype: torch.dtype) -> CanonicalWeight:
        if is_stored_plain(source, module):
            if source.has(f"{module}.weight_scale"):
                log.warning("%s is stored in 16 bits or more: the scale beside it is not used", module)
            return load_dense(source, module)
        scheme = self._declared(source, module)
        if isinstance(scheme, Int8 | Fp8):
            zero_name = f"{module}.weight_zero_point"
            _require_zeros(source, module, scheme)
            weight = read_eight_bit(source, module, scheme, f"{module}.weight_scale", zero_name=zero_name)
            refuse_zeros(source, zero_name, weight.zeros, symmetric=isinstance(scheme, Int8) and scheme.symmetric)
            return weight
        if isinstance(scheme, MicroScaled):
            return read_micro_scaled(source, module, scheme)
        return _Integers(source, module, scheme).read()

    def _declared(self, source: TensorSource, module: str) -> Int8 | Fp8 | MicroScaled | WeightOnly | LowBit:
        scheme = self.config.scheme(module)
        if isinstance(scheme, Int8) and source.has(f"{module}.weight_packed"):
            return LowBit(8, scheme.block[1], scheme.symmetric, activation=scheme.activation)
        if isinstance(scheme, Fp8) and _has_exponents(source, f"{module}.weight_scale"):
            activation = None if scheme.activation is None else replace(scheme.activation, power_of_two=True)
            return MicroScaled(Element.FP8, scheme.block[1], True, activation)
        if isinstance(scheme, Int8 | Fp8 | MicroScaled | WeightOnly | LowBit):
            return scheme
        name = next((f"{module}.{part}" for part in _PARTS if source.has(f"{module}.{part}")), f"{module}.weight")
        if not source.has(name):
            raise CheckpointError(missing(source, name))
        raise CheckpointError(
            f"{name} in {source.location(name)} is stored quantized, but the config leaves {module} out (ignore, or no "
            f"matching target): nothing says how to read it"
        )


def _require_zeros(source: TensorSource, module: str, scheme: Int8 | Fp8 | WeightOnly | LowBit) -> None:
    """CheckpointError where asymmetric weights come without their zero points."""
    name = f"{module}.weight_zero_point"
    if not isinstance(scheme, Fp8) and not scheme.symmetric and not source.has(name):
        raise CheckpointError(
            f"{name} is missing from {source.location(name)}; the config says symmetric: false, so that the weights "
            f"mean nothing without it. Fetch the file again, or set symmetric to true if they were quantized so"
        )


def _has_exponents(source: TensorSource, name: str) -> bool:
    """Whether scales are e8m0 exponents, whether or not the config gives their type."""
    return source.has(name) and source.dtype(name) in (torch.uint8, torch.float8_e8m0fnu)


def micro_scaled_shape(source: TensorSource, module: str, scheme: MicroScaled) -> tuple[int, int]:
    """(N, K), after checking that codes and scales fit each other."""
    fp4 = scheme.element is Element.FP4
    packed = f"{module}.weight_packed"
    name = next((n for n in (packed, f"{module}.weight") if source.has(n)), packed if fp4 else f"{module}.weight")
    rows, width = matrix_shape(source, name)
    shape = (rows, width * 2 if fp4 else width)
    wanted = torch.uint8 if fp4 else torch.float8_e4m3fn
    scale_name = f"{module}.weight_scale"
    if not source.has(scale_name):
        raise CheckpointError(missing(source, scale_name, f"{scheme} weights have no meaning without it"))
    scales = source.shape(scale_name)
    if source.dtype(name) is not wanted or scales != (rows, -(-shape[1] // scheme.group_size)):
        raise CheckpointError(
            f"{module} in {source.location(name)}: {name} is {source.dtype(name)} {[rows, width]} and its scales are "
            f"{list(scales)}; they do not fit {scheme}"
        )
    divisor = f"{module}.weight_global_scale"
    if not scheme.power_of_two and not source.has(divisor):
        raise CheckpointError(missing(source, divisor, f"{scheme} weights need it"))
    return shape


def read_micro_scaled(source: TensorSource, module: str, scheme: MicroScaled) -> MicroScaledWeight:
    """MXFP4, MXFP8 or NVFP4."""
    shape = micro_scaled_shape(source, module, scheme)
    packed = f"{module}.weight_packed"
    codes = source.get(packed if source.has(packed) else f"{module}.weight")
    scales = source.get(f"{module}.weight_scale")
    scales = scales.view(torch.uint8) if scheme.power_of_two else scales
    divisor = None
    if not scheme.power_of_two:
        divisor = source.get(f"{module}.weight_global_scale").reshape(-1, 1).to(torch.float32)
    scheme, input_scale, _ = with_static_input(source, module, scheme)
    return MicroScaledWeight(scheme, shape, codes, scales, divisor, input_scale)


class _Integers:
    """Reads integer weights of any width, packed or one per byte."""

    def __init__(self, source: TensorSource, module: str, scheme: WeightOnly | LowBit) -> None:
        self.source, self.module, self.scheme = source, module, scheme
        self.packed = source.has(f"{module}.weight_packed")
        self.shape = self._packed_shape() if self.packed else self._unpacked_shape()
        self.group_size = self._group_size()
        _require_zeros(source, module, scheme)
        self._require_group_index()

    def read(self) -> PackedWeight:
        index = self._group_index()
        size, perm, group_of_run = (self.group_size, None, None)
        if index is not None:
            size, perm, group_of_run = contiguous_groups(index, self._num_groups())
        scales, zeros = self._per_group("weight_scale"), self._zeros()
        if group_of_run is not None:
            scales, zeros = scales[:, group_of_run], None if zeros is None else zeros[:, group_of_run]
        scheme = replace(
            self.scheme,
            group_size=-1 if size >= self.shape[1] else size,
            symmetric=zeros is None,
            act_order=perm is not None,
        )
        input_scale = input_zero = None
        if isinstance(scheme, LowBit):
            scheme, input_scale, input_zero = with_static_input(self.source, self.module, scheme)
        zeros = None if zeros is None else zeros.contiguous()
        codes = self._codes(perm)
        return PackedWeight(scheme, self.shape, codes, scales.contiguous(), zeros, perm, input_scale, input_zero)

    def _unpacked_shape(self) -> tuple[int, int]:
        """Of codes that take a byte each."""
        name = f"{self.module}.weight"
        if not self.source.has(name):
            raise CheckpointError(missing(self.source, f"{self.module}.weight_packed"))
        shape = matrix_shape(self.source, name)
        refuse_dtype(self.source, name, torch.int8, f"{self.scheme} (weights type: int)")
        return shape

    def _packed_shape(self) -> tuple[int, int]:
        name, bits = f"{self.module}.weight_packed", self.scheme.bits
        rows, words = matrix_shape(self.source, name)
        stated = f"{self.module}.weight_shape"
        columns = words * 32 // bits
        if self.source.has(stated):
            rows_stated, columns = (int(size) for size in self.source.get(stated).tolist())
            rows = rows_stated if rows_stated == rows else -1
        if self.source.dtype(name) is not torch.int32 or rows < 0 or words != num_words(columns, bits):
            raise CheckpointError(
                f"{name} in {self.source.location(name)} is {self.source.dtype(name)} "
                f"{list(self.source.shape(name))}, which does not hold a matrix of {columns} columns in the "
                f"{bits} bits that the config says (num_bits)"
            )
        return rows, columns

    def _group_size(self) -> int:
        """Columns of a group: as declared, or as the scales' shape proves."""
        columns = self.shape[1]
        declared = (1, self.scheme.group_size)
        block = block_of_scales(self.source, f"{self.module}.weight_scale", self.shape, declared)
        return columns if block[1] == -1 else min(block[1], columns)

    def _num_groups(self) -> int:
        return -(-self.shape[1] // self.group_size)

    def _per_group(self, part: str) -> Tensor:
        """Stored values [N, G]; one for all is spread."""
        values = self.source.get(f"{self.module}.{part}")
        size = (self.shape[0], self._num_groups())
        return values.reshape(size) if values.numel() == size[0] * size[1] else values.reshape(1, 1).expand(size)

    def _zeros(self) -> Tensor | None:
        """Zeros of the unsigned codes as uint8 [N, G]; None when all are the middle one."""
        name, bits = f"{self.module}.weight_zero_point", self.scheme.bits
        if not self.source.has(name):
            return None
        if self.source.dtype(name) is torch.int32:
            zeros = unpack(self.source.get(name).T, bits, self.shape[0]).T
        else:
            zeros = (self._per_group("weight_zero_point").to(torch.int16) + 2 ** (bits - 1)).to(torch.uint8)
        found = None if bool((zeros == 2 ** (bits - 1)).all()) else zeros
        refuse_zeros(self.source, name, found, symmetric=self.scheme.symmetric)
        return found

    def _codes(self, perm: Tensor | None) -> Tensor:
        bits, columns = self.scheme.bits, self.shape[1]
        if self.packed:
            words = self.source.get(f"{self.module}.weight_packed").contiguous()
            return words if perm is None else pack(unpack(words, bits, columns)[:, perm.long()], bits)
        signed = self.source.get(f"{self.module}.weight")
        codes = (signed.to(torch.int16) + 2 ** (bits - 1)).to(torch.uint8)
        return pack(codes if perm is None else codes[:, perm.long()], bits)

    def _require_group_index(self) -> None:
        name = f"{self.module}.weight_g_idx"
        if self.scheme.act_order and not self.source.has(name):
            raise CheckpointError(
                f"{name} is missing from {self.source.location(name)}; the config says actorder: group, so that "
                f"nothing tells the group of a feature. Fetch the file again, or correct actorder"
            )

    def _group_index(self) -> Tensor | None:
        name = f"{self.module}.weight_g_idx"
        if not self.source.has(name):
            return None
        index = self.source.get(name).long()
        if index.numel() == 0 or int(index.max()) < 0:
            return None
        if index.shape != (self.shape[1],) or int(index.min()) < 0 or int(index.max()) >= self._num_groups():
            raise CheckpointError(
                f"{name} in {self.source.location(name)} must hold {self.shape[1]} groups in "
                f"0..{self._num_groups() - 1}; it has shape {list(index.shape)} and values "
                f"{int(index.min())}..{int(index.max())}"
            )
        return index
