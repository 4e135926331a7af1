"""The GPTQ quantization config: auto-gptq's, GPTQModel's and transformers' dialects of one dictionary."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import ConfigError, UnsupportedError
from ..scheme import Dense, Scheme, WeightOnly
from .names import is_head

BITS = (2, 3, 4, 8)
CHECKPOINT_FORMATS = ("gptq", "gptq_v2")
_SYNONYMS = {"bits": "w_bit", "group_size": "q_group_size", "sym": "sym", "desc_act": "desc_act"}


@dataclass(frozen=True, slots=True)
class DynamicRule:
    """One entry of ``dynamic``: modules whose full name ``pattern`` matches from its start get ``overrides``, or stay
    dense (``excluded``)."""

    pattern: re.Pattern[str]
    excluded: bool
    overrides: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTQConfig:
    """What the config declares.

    ``zeros_minus_one``  version 1 ("gptq"): zeros are stored minus one; version 2 ("gptq_v2") stores them as they are.
    ``dynamic``          rules by module, the first match wins.
    ``blocks``           suffixes of the modules that are quantized, or None: all linear layers but the head.
    ``stated``           bits, group_size, sym and desc_act as far as the config spells them out.
    """

    bits: int
    group_size: int
    symmetric: bool
    act_order: bool
    zeros_minus_one: bool
    head: bool
    dynamic: tuple[DynamicRule, ...]
    blocks: tuple[str, ...] | None
    plain: tuple[str, ...]
    stated: Mapping[str, Any]

    def scheme(self, module: str) -> Scheme:
        """The scheme declared for one linear module; the tensors themselves have the last word at load."""
        rule = self._rule(module)
        if rule is None and not self._quantized_by_default(module):
            return Dense()
        if rule is not None and rule.excluded:
            return Dense()
        overrides = {} if rule is None else rule.overrides
        return WeightOnly(
            bits=_bits(overrides.get("bits", self.bits), f"bits of {module}"),
            group_size=_group_size(overrides.get("group_size", self.group_size)),
            symmetric=bool(overrides.get("sym", self.symmetric)),
            act_order=bool(overrides.get("desc_act", self.act_order)),
        )

    def stated_of(self, module: str) -> Mapping[str, Any]:
        """What the config says of a quantized module in so many words, by key.

        Nothing of a head without a rule of its own: GPTQModel quantizes that as it likes.
        """
        rule = self._rule(module)
        if isinstance(self.scheme(module), Dense) or (rule is None and is_head(module)):
            return {}
        return {**self.stated, **({} if rule is None else rule.overrides)}

    def _rule(self, module: str) -> DynamicRule | None:
        return next((rule for rule in self.dynamic if rule.pattern.match(module)), None)

    def _quantized_by_default(self, module: str) -> bool:
        if is_head(module):
            return self.head
        if any(name in module for name in self.plain):
            return False
        return self.blocks is None or module.endswith(self.blocks)


def parse_gptq_config(raw: Mapping[str, Any]) -> GPTQConfig:
    """Read a ``quantization_config`` or ``quantize_config.json``.

    ConfigError names a wrong value; UnsupportedError names a variant of the format that is not served.
    """
    _refuse_variants(raw)
    return GPTQConfig(
        bits=_bits(raw.get("bits", raw.get("w_bit")), "bits"),
        group_size=_group_size(raw.get("group_size", raw.get("q_group_size", -1))),
        symmetric=bool(raw.get("sym", True)),
        act_order=bool(raw.get("desc_act", False)),
        zeros_minus_one=_checkpoint_format(raw) == "gptq",
        head=bool(raw.get("lm_head", False)),
        dynamic=tuple(_rule(key, value) for key, value in (raw.get("dynamic") or {}).items()),
        blocks=_blocks(raw),
        plain=tuple(raw.get("modules_to_not_convert") or ()),
        stated=_stated(raw),
    )


def _stated(raw: Mapping[str, Any]) -> dict[str, Any]:
    found = {key: raw.get(key, raw.get(synonym)) for key, synonym in _SYNONYMS.items()}
    return {key: value for key, value in found.items() if value is not None}


def _checkpoint_format(raw: Mapping[str, Any]) -> str:
    return str(raw.get("checkpoint_format") or raw.get("format") or "gptq").lower()


def _refuse_variants(raw: Mapping[str, Any]) -> None:
    layout = _checkpoint_format(raw)
    if raw.get("is_marlin_format"):
        layout = "marlin"
    if layout not in CHECKPOINT_FORMATS:
        raise UnsupportedError(
            f"GPTQ checkpoint_format {layout!r} is not served (it holds {CHECKPOINT_FORMATS[0]} weights rearranged for "
            f"one kernel, or another method); save the model as one of {', '.join(CHECKPOINT_FORMATS)}"
        )
    pack_dtype = str(raw.get("pack_dtype") or "int32").removeprefix("torch.")
    if pack_dtype != "int32":
        raise UnsupportedError(f"GPTQ pack_dtype {pack_dtype!r} is not served; save the model with pack_dtype int32")


def _bits(value: Any, what: str) -> int:
    if value not in BITS or isinstance(value, bool):
        raise ConfigError(f"GPTQ {what}: {value!r} is not one of {', '.join(map(str, BITS))}")
    return int(value)


def _group_size(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or (value < 1 and value != -1):
        raise ConfigError(f"GPTQ group_size {value!r} must be positive, or -1 for one group per output feature")
    return value


def _rule(key: str, value: Any) -> DynamicRule:
    excluded = key.startswith("-:")
    pattern = key[2:] if key[:2] in ("+:", "-:") else key
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"GPTQ dynamic rule {key!r} is not a regular expression: {error}") from None
    return DynamicRule(pattern=compiled, excluded=excluded or value is False, overrides=dict(value or {}))


def _blocks(raw: Mapping[str, Any]) -> tuple[str, ...] | None:
    """transformers' ``modules_in_block_to_quantize``: names, or lists of names that were quantized together."""
    entries = raw.get("modules_in_block_to_quantize")
    if not entries:
        return None
    names = [name for entry in entries for name in ([entry] if isinstance(entry, str) else entry)]
    return tuple(f".{name}" for name in names)
