"""KV-cache scales that a checkpoint carries, whatever their names."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..errors import CheckpointError
from ..log import get_logger
from .formats.base_source import TensorSource

log = get_logger(__name__)

# After ``layers.L.self_attn.``: llm-compressor, AutoFP8 and vLLM's name; before and after fusing q, k and v; the layer
# that computes attention; Quark's and older llm-compressor's observers on the projections' outputs.
_NAMES = {
    "k": ("k_scale", "attn.k_scale", "k_proj.k_scale", "qkv_proj.k_scale", "k_proj.output_scale"),
    "v": ("v_scale", "attn.v_scale", "v_proj.v_scale", "qkv_proj.v_scale", "v_proj.output_scale"),
}
# One for both (AutoFP8 before it told them apart).
_SHARED = ("kv_scale", "attn.kv_scale", "kv_cache_scale")
_ATTENTION = re.compile(r"^(.*\blayers\.(\d+)\.(?:self_attn|attention|attn))\.(.+)$")


@dataclass(frozen=True, slots=True)
class KVScales:
    """The cache holds ``key / k`` and ``value / v``."""

    k: float = 1.0
    v: float = 1.0


def read_kv_scales(source: TensorSource) -> dict[int, KVScales]:
    """Scales of each layer that has any. A scale that is missing beside the other one is 1.

    CheckpointError names a scale that is not one positive number, or two names that disagree.
    """
    stored: dict[int, dict[str, tuple[str, float]]] = {}
    for name in sorted(source.names):
        match = _ATTENTION.match(name)
        if match is None:
            continue
        for side in _sides(match[3]):
            _add(stored.setdefault(int(match[2]), {}), side, name, _value(source, name), match[3] in _SHARED)
    return {layer: _scales(layer, sides) for layer, sides in sorted(stored.items())}


def _sides(name: str) -> tuple[str, ...]:
    if name in _SHARED:
        return ("k", "v")
    return tuple(side for side, names in _NAMES.items() if name in names)


def _add(sides: dict[str, tuple[str, float]], side: str, name: str, value: float, shared: bool) -> None:
    """Keep a scale; one of a side's own wins over a shared one."""
    known = sides.get(side)
    if known is None or _is_shared(known[0]):
        sides[side] = (name, value)
    elif not shared and known[1] != value:
        raise CheckpointError(f"{known[0]} is {known[1]:g} and {name} is {value:g}: which of them scales the KV cache?")


def _is_shared(name: str) -> bool:
    return name.endswith(_SHARED)


def _value(source: TensorSource, name: str) -> float:
    value = source.get(name).float().flatten()
    if value.numel() != 1 or not 0.0 < float(value[0]) < float("inf"):
        raise CheckpointError(
            f"{name} in {source.location(name)} is {value.tolist()[:4]}; a KV-cache scale must be one positive number"
        )
    return float(value[0])


def _scales(layer: int, sides: dict[str, tuple[str, float]]) -> KVScales:
    for side in ("k", "v"):
        if side not in sides:
            other = next(iter(sides.values()))[0]
            log.warning("layer %d has %s but no %s scale: %s counts as 1", layer, other, side, side)
    return KVScales(**{side: value for side, (_, value) in sides.items()})


def describe_kv_scales(scales: dict[int, KVScales]) -> str:
    """One line for the log."""
    keys, values = [row.k for row in scales.values()], [row.v for row in scales.values()]
    return (
        f"the checkpoint has KV-cache scales for {len(scales)} layers (keys {min(keys):g} to {max(keys):g}, values "
        f"{min(values):g} to {max(values):g}); they are kept, and the cache is not quantized unless asked for"
    )
