"""Rotary embedding of a Hugging Face config: in the words of transformers 5, and in the older ones."""

from __future__ import annotations

from typing import Any

from ..errors import ConfigError, UnsupportedError
from .config_values import number
from .model_config import RopeConfig

ROPE_KINDS = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")
# What Phi-3's first configs called it.
_OLD_NAMES = {"su": "longrope"}
DEFAULT_THETA = 10000.0
_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})


def parse_ropes(
    raw: dict[str, Any], head_size: int, theta: float = DEFAULT_THETA, local_theta: float | None = None
) -> tuple[RopeConfig, RopeConfig | None]:
    """The rotary embedding, and that of layers with a window where it is another one.

    ``theta`` and ``local_theta`` are the family's bases for a config without them; only a family with a ``local_theta``
    has two embeddings.
    """
    if local_theta is None:
        return parse_rope(raw, head_size, theta), None
    options = _options(raw, "rope_parameters")
    by_type = options if set(options) <= _LAYER_TYPES else {"full_attention": options}
    scaling = by_type.get("full_attention") or raw.get("rope_scaling")
    local = by_type.get("sliding_attention") or {"rope_theta": raw.get("rope_local_base_freq")}
    return (
        parse_rope({**raw, "rope_parameters": scaling}, head_size, theta),
        parse_rope({**raw, "rope_parameters": local, "rope_theta": None}, head_size, local_theta),
    )


def parse_rope(raw: dict[str, Any], head_size: int, default_theta: float = DEFAULT_THETA) -> RopeConfig:
    """Rotary embedding from ``rope_parameters``, or from the older ``rope_theta`` and ``rope_scaling``."""
    options = dict(_options(raw, "rope_parameters") or _options(raw, "rope_scaling"))
    if any(isinstance(value, dict) for value in options.values()):
        raise UnsupportedError("rope_parameters differ by layer type, which is not served for this architecture")
    kind = options.pop("rope_type", None) or options.pop("type", None) or "default"
    options.pop("type", None)
    kind = _OLD_NAMES.get(kind, kind)
    if kind not in ROPE_KINDS:
        raise UnsupportedError(f"rope_type is {kind!r}; served are {', '.join(ROPE_KINDS)}")
    theta = options.pop("rope_theta", None) or raw.get("rope_theta") or default_theta
    partial = options.pop("partial_rotary_factor", None) or raw.get("partial_rotary_factor") or 1.0
    rotary = int(head_size * number({"partial_rotary_factor": partial}, "partial_rotary_factor"))
    if rotary % 2 or not 0 < rotary <= head_size:
        raise ConfigError(f"rotary size is {rotary}; it must be even and at most head_dim {head_size}")
    if kind == "default":
        return RopeConfig(theta=number({"rope_theta": theta}, "rope_theta"), rotary_size=rotary)
    _check_options(kind, options, raw, rotary)
    return RopeConfig(theta=number({"rope_theta": theta}, "rope_theta"), kind=kind, rotary_size=rotary, options=options)


def _options(raw: dict[str, Any], key: str) -> dict[str, Any]:
    options = raw.get(key) or {}
    if not isinstance(options, dict):
        raise ConfigError(f"{key} is {options!r}; it must be an object with rope_type and its numbers")
    return options


def _check_options(kind: str, options: dict[str, Any], raw: dict[str, Any], rotary: int) -> None:
    """Fill in the pretraining length and check that every number that the kind needs is there."""
    if kind in ("yarn", "llama3", "longrope"):
        fallback = options.get("original_max_position_embeddings", raw.get("max_position_embeddings"))
        options["original_max_position_embeddings"] = raw.get("original_max_position_embeddings") or fallback
    if kind in ("yarn", "longrope") and options.get("factor") is None:
        options["factor"] = raw["max_position_embeddings"] / options["original_max_position_embeddings"]
    needed = ["factor"] + (["low_freq_factor", "high_freq_factor"] if kind == "llama3" else [])
    for key in needed:
        number(options, key)
    for key in ("short_factor", "long_factor") if kind == "longrope" else ():
        values = options.get(key)
        if not isinstance(values, list) or len(values) != rotary // 2:
            found = len(values) if isinstance(values, list) else repr(values)
            raise ConfigError(
                f"{key} of longrope has {found} numbers; it must have {rotary // 2}, half the rotary size"
            )
