"""Quantized weights: how they lie on disk, what they mean, and how to make them.

The names below are loaded on first use: reading a checkpoint needs none of what makes one.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .ensure import ensure_quantized
    from .pipeline import quantize_model
    from .report import QuantizeReport
    from .spec import QuantizeSpec, parse_quantize_spec

__all__ = ["QuantizeReport", "QuantizeSpec", "ensure_quantized", "parse_quantize_spec", "quantize_model"]

_HOMES = {
    "QuantizeReport": "report",
    "QuantizeSpec": "spec",
    "ensure_quantized": "ensure",
    "parse_quantize_spec": "spec",
    "quantize_model": "pipeline",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
