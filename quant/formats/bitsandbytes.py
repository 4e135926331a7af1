"""bitsandbytes checkpoints, dequantized at load: their kernels compute with the expanded weights as well.

4 bits   P.weight uint8 [N K / 2, 1], high nibble first, codes of the flattened matrix; P.weight.quant_map [16];
         P.weight.absmax, one per block, or nested: uint8 with P.weight.nested_absmax and nested_quant_map [256];
         P.weight.quant_state.bitsandbytes__nf4 (or __fp4): JSON bytes with shape, blocksize, nested_offset ...
8 bits   P.weight int8 [N, K]; P.SCB [N] (or P.weight.SCB): W = weight * SCB / 127
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...errors import CheckpointError
from ..canonical import CanonicalWeight, DenseWeight, PackedWeight
from ..packing import pack
from ..scheme import Dense, Scheme, WeightOnly
from .base import Format, TensorSource
from .config_values import names
from .dense import load_dense
from .dtypes import is_stored_plain
from .names import is_head
from .tensor_reading import matrix_shape

_STATES = ("weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4")
_SCALES = ("SCB", "weight.SCB")
_PARTS = ("weight.quant_map", "weight.absmax", "weight.nested_absmax", "weight.nested_quant_map", "weight_format")


class BitsAndBytesFormat(Format):
    """nf4 and fp4 become dense; int8 becomes 8-bit weight-only (outlier features are not treated apart)."""

    name = "bitsandbytes"

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.four_bit = bool(raw.get("load_in_4bit", raw.get("_load_in_4bit", False)))
        self.plain = names(raw.get("llm_int8_skip_modules"), "bitsandbytes llm_int8_skip_modules")

    def scheme(self, module: str) -> Scheme:
        if self.four_bit or is_head(module) or any(f".{entry}." in f".{module}." for entry in self.plain):
            return Dense()
        return WeightOnly(8, -1)

    def tensor_names(self, module: str) -> tuple[str, ...]:
        return tuple(f"{module}.{part}" for part in ("weight", *_STATES, *_SCALES, *_PARTS))

    def stored_scheme(self, source: TensorSource, module: str) -> tuple[Scheme, tuple[int, int]]:
        if is_stored_plain(source, module):
            return Dense(), matrix_shape(source, f"{module}.weight")
        if source.dtype(f"{module}.weight") is torch.int8:
            self._scale_name(source, module)
            return WeightOnly(8, -1), matrix_shape(source, f"{module}.weight")
        return Dense(), _state_shape(_state(source, module), module)

    def _load(self, source: TensorSource, module: str, dtype: torch.dtype) -> CanonicalWeight:
        if not source.has(f"{module}.weight") or is_stored_plain(source, module):
            return load_dense(source, module)
        if source.dtype(f"{module}.weight") is torch.int8:
            return self._read_int8(source, module)
        return DenseWeight(_read_four_bit(source, module).to(dtype))

    def _read_int8(self, source: TensorSource, module: str) -> PackedWeight:
        codes = source.get(f"{module}.weight")
        scales = source.get(self._scale_name(source, module)).float().reshape(-1, 1) / 127
        if source.has(f"{module}.weight_format"):
            source.get(f"{module}.weight_format")
        packed = pack((codes.to(torch.int16) + 128).to(torch.uint8), 8)
        return PackedWeight(WeightOnly(8, -1), (codes.shape[0], codes.shape[1]), packed, scales)

    def _scale_name(self, source: TensorSource, module: str) -> str:
        for part in _SCALES:
            if source.has(f"{module}.{part}"):
                return f"{module}.{part}"
        name = f"{module}.SCB"
        raise CheckpointError(
            f"{name} is missing from {source.location(name)}: int8 weights have no meaning without it"
        )


def _state(source: TensorSource, module: str) -> dict[str, Any]:
    for part in _STATES:
        name = f"{module}.{part}"
        if source.has(name):
            try:
                return dict(json.loads(bytes(source.get(name).tolist())))
            except ValueError:
                raise CheckpointError(f"{name} in {source.location(name)} is not JSON") from None
    name = f"{module}.{_STATES[0]}"
    raise CheckpointError(f"{name} is missing from {source.location(name)}: 4-bit weights have no meaning without it")


def _state_shape(state: dict[str, Any], module: str) -> tuple[int, int]:
    shape = state.get("shape")
    if not isinstance(shape, list) or len(shape) != 2:
        raise CheckpointError(f"the quant_state of {module} gives shape {shape!r}; it must be two numbers")
    return int(shape[0]), int(shape[1])


def _read_four_bit(source: TensorSource, module: str) -> Tensor:
    """float32 [N, K]."""
    state, name = _state(source, module), f"{module}.weight"
    shape = _state_shape(state, module)
    packed = source.get(name).flatten().view(torch.uint8)
    size = shape[0] * shape[1]
    if packed.numel() != -(-size // 2):
        raise CheckpointError(
            f"{name} in {source.location(name)} holds {packed.numel()} bytes, not {list(shape)} codes"
        )
    codes = torch.stack((packed >> 4, packed & 0xF), dim=-1).flatten()[:size]
    values = source.get(f"{name}.quant_map").float()[codes.long()]
    return (values * _absmax(source, name, state).repeat_interleave(int(state["blocksize"]))[:size]).reshape(shape)


def _absmax(source: TensorSource, name: str, state: dict[str, Any]) -> Tensor:
    """The largest magnitude of each block, float32."""
    stored = source.get(f"{name}.absmax")
    if not source.has(f"{name}.nested_absmax"):
        return stored.float()
    values = source.get(f"{name}.nested_quant_map").float()[stored.long()]
    outer = source.get(f"{name}.nested_absmax").float().repeat_interleave(int(state["nested_blocksize"]))
    return values * outer[: values.numel()] + float(state["nested_offset"])
