"""AutoRound checkpoints: GPTQ's or AWQ's packing under a quant_method of their own (``auto-round``)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ...errors import UnsupportedError
from .awq import AWQFormat
from .base import Format
from .config_values import mapping
from .gptq import GPTQFormat

# A layer that AutoRound left alone is listed with so many bits.
PLAIN_BITS = 16


def auto_round_format(raw: Mapping[str, Any]) -> Format:
    """The format whose packing ``packing_format`` names; layers in ``extra_config`` differ from the rest.

    UnsupportedError names another packing, and numbers that are no integers.
    """
    kind = str(raw.get("data_type") or "int").lower()
    packing = str(raw.get("packing_format") or raw.get("backend") or "auto_round:auto_gptq").lower()
    if kind != "int" or not ("gptq" in packing or "awq" in packing or packing in ("auto", "auto_round")):
        raise UnsupportedError(
            f"AutoRound packing_format {packing!r} with data_type {kind!r} is not served; export the model as "
            f"auto_round:auto_gptq, auto_round:auto_awq or llm_compressor"
        )
    layers = mapping(raw.get("extra_config"), "AutoRound extra_config")
    plain = [name for name, options in layers.items() if _bits(options) >= PLAIN_BITS]
    shared = {key: raw[key] for key in ("bits", "group_size", "sym") if key in raw}
    if "awq" in packing:
        return AWQFormat({**shared, "zero_point": not raw.get("sym", False), "modules_to_not_convert": plain})
    rules: dict[str, Any] = {f"-:{_exactly(name)}": {} for name in plain}
    rules |= {f"+:{_exactly(name)}": dict(options) for name, options in layers.items() if name not in plain}
    return GPTQFormat({**shared, "checkpoint_format": "gptq", "dynamic": rules, "lm_head": "lm_head" in layers})


def _bits(options: Any) -> int:
    value = mapping(options, "AutoRound extra_config's layers").get("bits")
    return value if isinstance(value, int) else 0


def _exactly(name: str) -> str:
    """A rule for one module; AutoRound's names may be regular expressions already."""
    return f"{name}$" if re.search(r"[*^$\\\[(|+?]", name) else f"{re.escape(name)}$"
