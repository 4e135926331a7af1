"""On-disk formats: read a config, say each layer's scheme, convert to the canonical layout."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...errors import ConfigError, UnsupportedError
from .auto_round import auto_round_format
from .awq import AWQFormat
from .base import Format, TensorSource
from .bitsandbytes import BitsAndBytesFormat
from .compressed_tensors import CompressedTensorsFormat
from .dense import DenseFormat
from .fp8 import Fp8Format, fbgemm_format
from .gptq import GPTQFormat
from .modelopt import modelopt_format
from .quark import QuarkFormat

__all__ = ["AWQFormat", "DenseFormat", "Format", "GPTQFormat", "TensorSource", "detect_format", "read_quantization"]

_FORMATS: dict[str, Callable[[Mapping[str, Any]], Format]] = {
    "gptq": GPTQFormat,
    "awq": AWQFormat,
    "compressed-tensors": CompressedTensorsFormat,
    "fp8": Fp8Format,
    "modelopt": modelopt_format,
    "modelopt_fp4": modelopt_format,
    "fbgemm_fp8": fbgemm_format,
    "auto-round": auto_round_format,
    "intel/auto-round": auto_round_format,
    "quark": QuarkFormat,
    "bitsandbytes": BitsAndBytesFormat,
}
SERVED = tuple(_FORMATS)
# Methods that people bring and that are not served, with what to do instead.
REMEDIES = {
    "hqq": "quantize the original model again (twofold quantize, or GPTQ or AWQ by another tool)",
    "aqlm": "its codebooks have no kernel here; take a GPTQ, AWQ or FP8 checkpoint of the model",
    "torchao": "it is stored as pickled tensor classes; take a GPTQ, AWQ or FP8 checkpoint of the model",
    "eetq": "load the original model with --quantization int8",
    "quanto": "load the original model with --quantization int8 or int4",
}
# Where tools wrote the config before it moved into config.json.
SIDE_CONFIGS = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")


def detect_format(quantization: Mapping[str, Any] | None) -> Format:
    """The format that a ``quantization_config`` describes; None means plain weights.

    UnsupportedError names a method that is not served; ConfigError names a wrong value.
    """
    if not quantization:
        return DenseFormat()
    method = quantization_method(quantization)
    if method in _FORMATS:
        return _FORMATS[method](quantization)
    remedy = f": {REMEDIES[method]}" if method in REMEDIES else ""
    raise UnsupportedError(
        f"quantization method {method!r} is not served{remedy}; there are {', '.join(SERVED)} and plain weights"
    )


def quantization_method(quantization: Mapping[str, Any]) -> str:
    """``quant_method``, or what the keys of an older config without it say."""
    method = quantization.get("quant_method") or quantization.get("method")
    if method:
        return str(method).lower()
    if "config_groups" in quantization:
        return "compressed-tensors"
    if "producer" in quantization and "quantization" in quantization:
        return str(dict(quantization["producer"]).get("name")).lower()
    has_bits = "bits" in quantization or "w_bit" in quantization
    if has_bits and ("zero_point" in quantization or "version" in quantization):
        return "awq"
    return "gptq" if has_bits else "unknown"


def read_quantization(directory: Path, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The quantization config of a model folder: from config.json, else from an older tool's file beside it."""
    inside = config.get("quantization_config") or config.get("compression_config")
    if inside:
        return dict(inside)
    for name in SIDE_CONFIGS:
        path = directory / name
        if path.is_file():
            try:
                return dict(json.loads(path.read_text(encoding="utf-8")))
            except (ValueError, TypeError) as error:
                raise ConfigError(f"{path} is not a JSON object: {error}") from None
    return None
