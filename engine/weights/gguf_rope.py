"""Rotary scaling of a GGUF file in the words of a Hugging Face config."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...errors import UnsupportedError
from .gguf_file import GgufFile

# The constants of Llama 3.1 and later, the only family whose files carry rope_freqs.
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
FACTORS_TENSOR = "rope_freqs.weight"


def rope_parameters(file: GgufFile, head_size: int) -> dict[str, Any]:
    """``rope_parameters``: theta, type and the type's own options."""
    prefix = f"{file.architecture}.rope"
    parameters: dict[str, Any] = {
        "rope_theta": float(file.value(f"{prefix}.freq_base", 10000.0)),
        "rope_type": "default",
    }
    rotary = int(file.value(f"{prefix}.dimension_count", head_size))
    if rotary != head_size:
        parameters["partial_rotary_factor"] = rotary / head_size
    if FACTORS_TENSOR in file.tensors:
        return parameters | _llama3(file, parameters["rope_theta"], rotary)
    return parameters | _scaling(file, prefix)


def _scaling(file: GgufFile, prefix: str) -> dict[str, Any]:
    kind = file.value(f"{prefix}.scaling.type", "none")
    factor = float(file.value(f"{prefix}.scaling.factor", file.value(f"{prefix}.scale_linear", 1.0)))
    if kind == "none" or factor in (0.0, 1.0):
        return {}
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        original = file.require(f"{prefix}.scaling.original_context_length")
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": int(original)}
    raise UnsupportedError(f"{file.path.name} has rope scaling {kind!r}; served are none, linear, yarn and llama3")


def _llama3(file: GgufFile, theta: float, rotary: int) -> dict[str, Any]:
    """The Llama 3 rule whose per-frequency divisors are stored; UnsupportedError when no such rule gives them."""
    stored = file.read(FACTORS_TENSOR)
    factor = float(stored.max())
    if factor == 1.0:
        return {}
    if stored.shape != (rotary // 2,) or not np.allclose(stored, _llama3_divisors(theta, rotary, factor), rtol=1e-3):
        raise UnsupportedError(f"{FACTORS_TENSOR} in {file.path.name} is not Llama 3's rope scaling")
    return {"rope_type": "llama3", "factor": factor, **LLAMA3}


def _llama3_divisors(theta: float, rotary: int, factor: float) -> np.ndarray:
    wavelength = 2 * np.pi * theta ** (np.arange(0, rotary, 2) / rotary)
    low, high, original = (
        LLAMA3["low_freq_factor"],
        LLAMA3["high_freq_factor"],
        LLAMA3["original_max_position_embeddings"],
    )
    smooth = np.clip((original / wavelength - low) / (high - low), 0.0, 1.0)
    return 1.0 / ((1.0 - smooth) / factor + smooth)
