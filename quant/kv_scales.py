"""KV-cache scales that a checkpoint carries, whatever their names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError
from .formats.base_source import TensorSource

# After ``layers.L.self_attn.``: llm-compressor, AutoFP8 and vLLM's name; before and after fusing q, k and v (ModelOpt);
# the layer that computes attention; Quark's and older llm-compressor's observers on the projections' outputs.
_NAMES = {
    side: (
        f"{side}_scale",
        f"attn.{side}_scale",
        f"{side}_proj.{side}_scale",
        f"qkv_proj.{side}_scale",
        f"{side}_proj.output_scale",
        f"{side}_cache_scale",
        f"{side}_cache.scale",
    )
    for side in ("k", "v")
}
# One for both (AutoFP8 before it told them apart).
_SHARED = ("kv_scale", "attn.kv_scale", "kv_cache_scale")
_ATTENTION = re.compile(r"^(.*\blayers\.(\d+)\.(?:self_attn|attention|attn))\.(.+)$")


@dataclass(frozen=True, slots=True)
class KVScales:
    """The cache holds ``key / k`` and ``value / v``: one number each, or one per KV head."""

    k: float | tuple[float, ...] = 1.0
    v: float | tuple[float, ...] = 1.0

    def tensors(self, dtype: torch.dtype, num_kv_heads: int, layer: int) -> tuple[Tensor, Tensor]:
        """Scales of keys and of values, float32, a number or [G], for a cache of ``dtype``.

        An e4m3fnuz code means half as much as the same e4m3fn one, so scales made for e4m3fn double. CheckpointError
        where there are neither one nor G of them.
        """
        factor = 2.0 if dtype is torch.float8_e4m3fnuz else 1.0
        for side, value in (("k", self.k), ("v", self.v)):
            if isinstance(value, tuple) and len(value) != num_kv_heads:
                raise CheckpointError(
                    f"layer {layer} has {len(value)} {side} scales for the KV cache; there must be one, or one for "
                    f"each of its {num_kv_heads} KV heads; leave out kv_cache_dtype to serve it without them"
                )
        return torch.tensor(self.k) * factor, torch.tensor(self.v) * factor


def calibrated_for(quantization: Mapping[str, Any] | None) -> str:
    """``int8`` where a checkpoint's config says that its KV-cache scales are for 8-bit integers, else ``fp8``."""
    config = quantization or {}
    scheme = config.get("kv_cache_scheme")
    if isinstance(scheme, Mapping) and scheme.get("type") == "int":
        return "int8"
    return "int8" if "int8" in _dtypes(config.get("kv_cache_quant_config")) else "fp8"


def _dtypes(config: object) -> set[object]:
    """The values of every ``dtype`` in a nested config (Quark has one per projection)."""
    if not isinstance(config, Mapping):
        return set()
    return {config.get("dtype")}.union(*map(_dtypes, config.values()))


def scaled_layers(source: TensorSource) -> list[int]:
    """Layers that have a KV-cache scale, from the names alone."""
    return sorted({layer for _, layer, _ in _scale_names(source)})


def is_kv_scale(name: str) -> bool:
    """Whether a tensor's name is one of a KV-cache scale."""
    match = _ATTENTION.match(name)
    return match is not None and bool(_sides(match[3]))


def read_kv_scales(source: TensorSource) -> dict[int, KVScales]:
    """Scales of each layer that has any.

    CheckpointError names a scale that is not made of positive numbers or that is missing beside the other one, or two
    names that disagree.
    """
    check_kv_scales(source)
    stored: dict[int, dict[str, tuple[str, float | tuple[float, ...]]]] = {}
    for name, layer, kind in _scale_names(source):
        for side in _sides(kind):
            _add(stored.setdefault(layer, {}), side, name, _value(source, name), kind in _SHARED)
    return {layer: _scales(sides) for layer, sides in sorted(stored.items())}


def check_kv_scales(source: TensorSource) -> None:
    """CheckpointError for a layer with only one of its two scales, from the names alone."""
    found: dict[int, dict[str, str]] = {}
    for name, layer, kind in _scale_names(source):
        found.setdefault(layer, {}).update(dict.fromkeys(_sides(kind), name))
    for layer, sides in sorted(found.items()):
        for side in {"k", "v"} - set(sides):
            there = next(iter(sides.values()))
            raise CheckpointError(
                f"layer {layer} has {there} in {source.location(there)} but no {side} scale for the KV cache: fetch "
                f"the file again, or leave out kv_cache_dtype to serve the model without these scales"
            )


def _scale_names(source: TensorSource) -> Iterator[tuple[str, int, str]]:
    """(name, layer, name after the attention module) of each scale."""
    for name in sorted(source.names):
        match = _ATTENTION.match(name)
        if match is not None and _sides(match[3]):
            yield name, int(match[2]), match[3]


def _sides(name: str) -> tuple[str, ...]:
    if name in _SHARED:
        return ("k", "v")
    return tuple(side for side, names in _NAMES.items() if name in names)


def _add(
    sides: dict[str, tuple[str, float | tuple[float, ...]]],
    side: str,
    name: str,
    value: float | tuple[float, ...],
    shared: bool,
) -> None:
    """Keep a scale; one of a side's own wins over a shared one."""
    known = sides.get(side)
    if known is None or _is_shared(known[0]):
        sides[side] = (name, value)
    elif not shared and known[1] != value:
        raise CheckpointError(f"{known[0]} is {known[1]} and {name} is {value}: which of them scales the KV cache?")


def _is_shared(name: str) -> bool:
    return name.endswith(_SHARED)


def _value(source: TensorSource, name: str) -> float | tuple[float, ...]:
    values: list[float] = source.get(name).float().flatten().tolist()
    if not values or not all(0.0 < value < float("inf") for value in values):
        raise CheckpointError(
            f"{name} in {source.location(name)} is {values[:4]}; a KV-cache scale must be a positive number, or one "
            "for each KV head"
        )
    return values[0] if len(set(values)) == 1 else tuple(values)


def _scales(sides: dict[str, tuple[str, float | tuple[float, ...]]]) -> KVScales:
    return KVScales(**{side: value for side, (_, value) in sides.items()})


def describe_kv_scales(scales: Mapping[int, KVScales]) -> str:
    """Scales in use, for the log."""
    keys, values = ([_low_high(getattr(row, side)) for row in scales.values()] for side in ("k", "v"))
    ranges = [f"{min(low for low, _ in rows):g} to {max(high for _, high in rows):g}" for rows in (keys, values)]
    return f"the checkpoint's calibrated scales for {len(scales)} layers (keys {ranges[0]}, values {ranges[1]})"


def _low_high(scale: float | tuple[float, ...]) -> tuple[float, float]:
    """The smallest and the largest of a side's scales."""
    return (min(scale), max(scale)) if isinstance(scale, tuple) else (scale, scale)


def why_unused(num_layers: int, made_for: str, option: str) -> str:
    """Why a checkpoint's scales for ``num_layers`` layers are not used with a ``kv_cache_dtype``, for the log."""
    has = f"the checkpoint has KV-cache scales for {num_layers} layers, made for {made_for}"
    if option in ("auto", "bfloat16"):
        return (
            f"{has}; they are not used, because the cache is not quantized unless asked for: "
            f"--kv-cache-dtype {made_for} uses them"
        )
    return f"{has}; {option} does not use them: each token and head gets a scale of its own"
