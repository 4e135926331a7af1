"""fp8 checkpoints: two families under ``quant_method: fp8``, told apart by their tensors, and others like them.

    blocks     P.weight float8_e4m3fn [N, K]; P.weight_scale_inv [ceil(N / 128), ceil(K / 128)] in float32, bfloat16 or
               e8m0. The weight is code * scale, despite the name (DeepSeek, Qwen, transformers).
    AutoFP8    P.weight; P.weight_scale []; static activations: P.input_scale [].

ModelOpt's FP8 is stored as AutoFP8's; FBGEMM's has P.weight_scale [N, 1] and dynamic activations.

Scales of experts may be packed per layer: ``experts.gate_up_proj_scale_inv`` [E, 2 I / 128, H / 128], the gate's rows
first, and ``experts.down_proj_scale_inv``.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...errors import CheckpointError, ConfigError, UnsupportedError
from ...log import get_logger
from ..canonical import CanonicalWeight
from ..scheme import Activation, Dense, Element, Fp8, Scheme
from .base import Format, TensorSource
from .config_values import names, pattern
from .dense import load_dense
from .dtypes import is_stored_plain
from .names import is_head
from .tensor_reading import eight_bit_scheme, matrix_shape, needs_static, read_eight_bit

log = get_logger(__name__)

_SCALES = ("weight_scale_inv", "weight_scale")
_EXPERT = re.compile(r"^(.*\bexperts)\.(\d+)\.(gate_proj|up_proj|down_proj|w[123])$")
# An expert's matrix: the packed scales it is in, and which half of their rows.
_PACKED = {
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
    "down_proj": ("down_proj", None),
    "w1": ("gate_up_proj", 0),
    "w3": ("gate_up_proj", 1),
    "w2": ("down_proj", None),
}


@dataclass(frozen=True, slots=True)
class Fp8Config:
    """What the config declares; ``plain`` are names of modules that stay dense."""

    block: tuple[int, int] | None
    static: bool
    plain: tuple[str, ...]

    def fp8_scheme(self) -> Fp8:
        """The scheme of a quantized module, before its tensors say how its scales lie."""
        if self.static:
            return Fp8(self.block or (-1, -1), Activation(Element.FP8, 0, dynamic=False))
        # AutoFP8 has one dynamic scale for a whole tensor; one per token is finer and independent of the batch.
        return Fp8(self.block or (-1, -1), Activation(Element.FP8, -1 if self.block is None else self.block[1]))


def parse_fp8_config(raw: Mapping[str, Any]) -> Fp8Config:
    """ConfigError names a wrong value, UnsupportedError another kind of float."""
    activation = str(raw.get("activation_scheme", "dynamic")).lower()
    if activation not in ("static", "dynamic"):
        raise ConfigError(f"fp8 activation_scheme {activation!r} must be static or dynamic")
    kind = str(raw.get("fmt") or "e4m3").lower()
    if kind not in ("e4m3", "float8_e4m3fn", "e4m3fn"):
        raise UnsupportedError(f"fp8 fmt {kind!r} is not served; served is e4m3")
    return Fp8Config(
        block=_block(raw.get("weight_block_size")),
        static=activation == "static",
        plain=names(raw.get("ignored_layers"), "fp8 ignored_layers")
        + names(raw.get("modules_to_not_convert"), "fp8 modules_to_not_convert"),
    )


def fbgemm_format(raw: Mapping[str, Any]) -> Fp8Format:
    """FBGEMM's fp8 (Meta's Llama 3.1 405B); its bound on the activations' scales is not applied."""
    return Fp8Format({"activation_scheme": "dynamic", "modules_to_not_convert": raw.get("modules_to_not_convert")})


def _block(value: Any) -> tuple[int, int] | None:
    if value is None:
        return None
    if not isinstance(value, list | tuple) or len(value) != 2 or not all(isinstance(v, int) and v > 0 for v in value):
        raise ConfigError(f"fp8 weight_block_size {value!r} must be two positive numbers, rows and columns")
    return int(value[0]), int(value[1])


class Fp8Format(Format):
    """A weight that is stored in 16 bits or more is dense in any case, whatever scales lie beside it."""

    name = "fp8"
    marks = _SCALES

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.config = parse_fp8_config(raw)

    def scheme(self, module: str) -> Scheme:
        if is_head(module) or any(_names(entry, module) for entry in self.config.plain):
            return Dense()
        return self.config.fp8_scheme()

    def tensor_names(self, module: str) -> tuple[str, ...]:
        own = tuple(f"{module}.{part}" for part in ("weight", *_SCALES, "input_scale"))
        match = _EXPERT.match(module)
        return own if match is None else own + tuple(_packed_names(match))

    def stored_scheme(self, source: TensorSource, module: str) -> tuple[Scheme, tuple[int, int]]:
        if is_stored_plain(source, module):
            return Dense(), matrix_shape(source, f"{module}.weight")
        scheme, name = self.config.fp8_scheme(), self._scale_name(source, module)
        if source.has(name):
            return eight_bit_scheme(source, module, scheme, name)
        shape = matrix_shape(source, f"{module}.weight")
        needs_static(source, module, scheme.activation)
        _packed_place(source, module, scheme, shape)
        return scheme, shape

    def _load(self, source: TensorSource, module: str, dtype: torch.dtype) -> CanonicalWeight:
        if is_stored_plain(source, module):
            if any(source.has(f"{module}.{part}") for part in _SCALES):
                log.debug("%s is stored in 16 bits or more: the scale beside it is not used", module)
                self._take_scales(source, module)
            return load_dense(source, module)
        scheme, name = self.config.fp8_scheme(), self._scale_name(source, module)
        if source.has(name):
            return read_eight_bit(source, module, scheme, name)
        return read_eight_bit(source, module, scheme, name, scales=_packed_scales(source, module, scheme))

    def _scale_name(self, source: TensorSource, module: str) -> str:
        """The tensor of the module's scales; CheckpointError when there is none."""
        own = next((f"{module}.{part}" for part in _SCALES if source.has(f"{module}.{part}")), None)
        if own is not None or _packed_name(source, module) is not None:
            return own or f"{module}.{_SCALES[0]}"
        name = f"{module}.weight"
        matrix_shape(source, name)
        raise CheckpointError(
            f"{name} in {source.location(name)} is {source.dtype(name)}, but there is neither weight_scale nor "
            f"weight_scale_inv for it: it has no meaning without a scale"
        )

    def _take_scales(self, source: TensorSource, module: str) -> None:
        """Read the unused scales, so that they are not reported as left over."""
        for part in _SCALES:
            if source.has(f"{module}.{part}"):
                source.get(f"{module}.{part}")


def _names(entry: str, module: str) -> bool:
    """Whether an entry of the config names the module: in full, by any run of its parts, or by a pattern."""
    if entry.startswith("re:"):
        return bool(pattern(entry[3:], "fp8 ignored_layers").match(module))
    return f".{entry}." in f".{module}." or fnmatch.fnmatchcase(module, entry)


def _packed_name(source: TensorSource, module: str) -> tuple[str, int, int | None] | None:
    """(tensor, expert, half of its rows) of an expert's packed scales, if there are any."""
    match = _EXPERT.match(module)
    if match is None:
        return None
    name = next((name for name in _packed_names(match) if source.has(name)), None)
    return None if name is None else (name, int(match[2]), _PACKED[match[3]][1])


def _packed_names(match: re.Match[str]) -> list[str]:
    """Where the scales of all experts of a layer may be, for a match of ``_EXPERT``."""
    return [f"{match[1]}.{_PACKED[match[3]][0]}_{suffix}" for suffix in ("scale_inv", "scale")]


def _packed_place(source: TensorSource, module: str, scheme: Fp8, shape: tuple[int, int]) -> tuple[str, int, slice]:
    """(tensor, expert, rows) of an expert's packed scales, checked against its weight."""
    found = _packed_name(source, module)
    assert found is not None, f"{module} has no packed scales"
    name, expert, half = found
    rows, columns = scheme.num_blocks(shape)
    stored = source.shape(name)
    if len(stored) != 3 or expert >= stored[0] or stored[1:] != ((1 if half is None else 2) * rows, columns):
        raise CheckpointError(
            f"{name} in {source.location(name)} is {list(stored)}, which does not fit {module} {list(shape)} in blocks "
            f"of {list(scheme.block)}"
        )
    return name, expert, slice(None) if half is None else slice(half * rows, (half + 1) * rows)


def _packed_scales(source: TensorSource, module: str, scheme: Fp8) -> Tensor:
    name, expert, rows = _packed_place(source, module, scheme, matrix_shape(source, f"{module}.weight"))
    scales = source.get(name)[expert, rows]
    return scales.float() if scales.dtype is torch.float8_e8m0fnu else scales
