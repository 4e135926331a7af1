"""The sliding window of each layer, as each family's config says it."""

from __future__ import annotations

from typing import Any

from ..errors import ConfigError, UnsupportedError

Windows = tuple[int | None, ...]


def none(raw: dict[str, Any], num_layers: int) -> Windows:
    """Full attention everywhere."""
    return (None,) * num_layers


def mistral(raw: dict[str, Any], num_layers: int) -> Windows:
    """One window for all layers, 4096 where the config does not say; null is none."""
    return (raw.get("sliding_window", 4096),) * num_layers


def uniform(raw: dict[str, Any], num_layers: int) -> Windows:
    """One window for all layers where the config gives one (Mixtral, Phi-3)."""
    return (raw.get("sliding_window"),) * num_layers


def qwen(raw: dict[str, Any], num_layers: int) -> Windows:
    """Layers from ``max_window_layers`` on, where windows are switched on at all."""
    window = raw.get("sliding_window", 4096) if raw.get("use_sliding_window", False) else None
    layer_types = raw.get("layer_types")
    if layer_types is None:
        first = raw.get("max_window_layers", 28)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    return _typed(layer_types, window, num_layers)


def qwen2_moe(raw: dict[str, Any], num_layers: int) -> Windows:
    """Every other layer below ``max_window_layers``."""
    window = raw.get("sliding_window", 4096) if raw.get("use_sliding_window", False) else None
    layer_types = raw.get("layer_types")
    if layer_types is None:
        last = raw.get("max_window_layers", 28)
        return tuple(window if layer < last and (layer + 1) % 2 else None for layer in range(num_layers))
    return _typed(layer_types, window, num_layers)


def qwen3_moe(raw: dict[str, Any], num_layers: int) -> Windows:
    """All layers, where windows are switched on."""
    return (raw.get("sliding_window", 4096) if raw.get("use_sliding_window", False) else None,) * num_layers


def ministral(raw: dict[str, Any], num_layers: int) -> Windows:
    """By ``layer_types``; without them all layers."""
    window = raw.get("sliding_window")
    default = ["sliding_attention" if window is not None else "full_attention"] * num_layers
    return _typed(raw.get("layer_types") or default, window, num_layers)


def gemma2(raw: dict[str, Any], num_layers: int) -> Windows:
    """Every other layer, beginning with the first."""
    return _periodic(raw, num_layers, 2)


def gemma3(raw: dict[str, Any], num_layers: int) -> Windows:
    """All but every sixth layer."""
    pattern = raw.get("sliding_window_pattern") or raw.get("_sliding_window_pattern") or 6
    if isinstance(pattern, bool) or not isinstance(pattern, int) or pattern < 1:
        raise ConfigError(f"sliding_window_pattern is {pattern!r}; it must be a whole number of at least 1")
    return _periodic(raw, num_layers, pattern)


def check(windows: Windows) -> Windows:
    """The windows; ConfigError where one is no number of tokens."""
    for window in windows:
        if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
            raise ConfigError(f"sliding_window is {window!r}; it must be a whole number of at least 1, or null")
    return windows


def _periodic(raw: dict[str, Any], num_layers: int, pattern: int) -> Windows:
    """By ``layer_types``; without them every ``pattern``-th layer sees everything."""
    kinds = ["sliding_attention" if (layer + 1) % pattern else "full_attention" for layer in range(num_layers)]
    return _typed(raw.get("layer_types") or kinds, raw.get("sliding_window", 4096), num_layers)


def _typed(layer_types: list[str], window: int | None, num_layers: int) -> Windows:
    unknown = sorted(set(layer_types) - {"full_attention", "sliding_attention"})
    if unknown:
        raise UnsupportedError(f"layer_types names {unknown[0]!r}; served are full_attention and sliding_attention")
    if len(layer_types) != num_layers:
        raise ConfigError(f"layer_types has {len(layer_types)} entries for num_hidden_layers {num_layers}")
    if window is None and "sliding_attention" in layer_types:
        raise ConfigError("layer_types names sliding_attention but no sliding_window is in use")
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)
