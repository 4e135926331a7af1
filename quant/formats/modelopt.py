"""NVIDIA ModelOpt checkpoints (``quant_method: modelopt``, or the same in hf_quant_config.json).

FP8    as AutoFP8's, see ``fp8``
NVFP4  P.weight uint8 [N, K / 2], low nibble first; P.weight_scale float8_e4m3fn [N, K / 16];
       P.weight_scale_2 [], P.input_scale []: what the groups' scales are multiplied by
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...errors import CheckpointError, UnsupportedError
from ..canonical import CanonicalWeight, MicroScaledWeight
from ..scheme import Activation, Dense, Element, MicroScaled, Scheme
from .base import Format, TensorSource
from .config_values import mapping, names
from .dense import load_dense
from .dtypes import is_stored_plain
from .fp8 import Fp8Format
from .names import is_head
from .tensor_reading import matrix_shape

_FP8 = {"FP8": "static", "FP8_PER_CHANNEL_PER_TOKEN": "dynamic"}
# AWQ's scales are folded into the layers before; where a file still holds some, they are tensors nobody asks for.
_NVFP4 = {"NVFP4": True, "NVFP4_AWQ": True, "W4A16_NVFP4": False}
GROUP = 16


def modelopt_format(raw: Mapping[str, Any]) -> Format:
    """The config in config.json, or nested in hf_quant_config.json; UnsupportedError names an algorithm not served."""
    inner = mapping(raw.get("quantization"), "modelopt quantization") or dict(raw)
    algorithm = str(inner.get("quant_algo")).upper()
    plain = inner.get("exclude_modules", inner.get("ignore"))
    if algorithm in _FP8:
        return Fp8Format({"activation_scheme": _FP8[algorithm], "ignored_layers": plain})
    if algorithm in _NVFP4:
        return NvFp4Format(names(plain, "modelopt exclude_modules"), quantizes_input=_NVFP4[algorithm])
    raise UnsupportedError(
        f"modelopt quant_algo {inner.get('quant_algo')!r} is not served; served are {', '.join((*_FP8, *_NVFP4))}, and "
        f"llm-compressor's checkpoints of the other schemes"
    )


class NvFp4Format(Format):
    """A weight that is stored in 16 bits is dense in any case; ``plain`` names the modules that should be."""

    name = "modelopt"
    marks = ("weight_scale",)

    def __init__(self, plain: tuple[str, ...], *, quantizes_input: bool) -> None:
        self.plain = plain
        activation = Activation(Element.FP4, GROUP, dynamic=False) if quantizes_input else None
        self._scheme = MicroScaled(Element.FP4, GROUP, False, activation)

    def scheme(self, module: str) -> Scheme:
        excluded = any(f".{entry}." in f".{module}." or fnmatch.fnmatchcase(module, entry) for entry in self.plain)
        return Dense() if excluded or is_head(module) else self._scheme

    def tensor_names(self, module: str) -> tuple[str, ...]:
        return tuple(f"{module}.{part}" for part in ("weight", "weight_scale", "weight_scale_2", "input_scale"))

    def stored_scheme(self, source: TensorSource, module: str) -> tuple[Scheme, tuple[int, int]]:
        if is_stored_plain(source, module):
            return Dense(), matrix_shape(source, f"{module}.weight")
        rows, width = matrix_shape(source, f"{module}.weight")
        scales, stored = f"{module}.weight_scale", source.dtype(f"{module}.weight")
        groups = matrix_shape(source, scales)
        if stored is not torch.uint8 or groups != (rows, -(-width * 2 // GROUP)):
            raise CheckpointError(
                f"{module}.weight in {source.location(scales)} is {stored} {[rows, width]} and its scales are "
                f"{list(groups)}; they do not fit {self._scheme}"
            )
        _require(source, f"{module}.weight_scale_2")
        if self._scheme.activation is not None:
            _require(source, f"{module}.input_scale")
        return self._scheme, (rows, width * 2)

    def _load(self, source: TensorSource, module: str, dtype: torch.dtype) -> CanonicalWeight:
        if not source.has(f"{module}.weight") or is_stored_plain(source, module):
            return load_dense(source, module)
        _, shape = self.stored_scheme(source, module)
        input_scale = None
        if self._scheme.activation is not None:
            input_scale = _reciprocal(source, f"{module}.input_scale").reshape(())
        return MicroScaledWeight(
            self._scheme,
            shape,
            source.get(f"{module}.weight"),
            source.get(f"{module}.weight_scale"),
            _reciprocal(source, f"{module}.weight_scale_2").reshape(1, 1),
            input_scale,
        )


def _require(source: TensorSource, name: str) -> None:
    if not source.has(name):
        raise CheckpointError(f"{name} is missing from {source.location(name)}; NVFP4 codes have no meaning without it")


def _reciprocal(source: TensorSource, name: str) -> Tensor:
    """ModelOpt multiplies by what the canonical layout divides by."""
    value = source.get(name)
    if value.numel() != 1 or not bool(value.float().abs() > 0):
        raise CheckpointError(f"{name} in {source.location(name)} is {value.tolist()}; it must be one positive number")
    return 1.0 / value.to(torch.float32)
