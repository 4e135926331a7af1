"""Inverse frequencies of rotary embedding and how each kind of scaling changes them.

All in float32 with the operations in the order of the papers' reference code, so that angles at large positions agree.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..model_config import RopeConfig


def inverse_frequencies(rope: RopeConfig, max_position_embeddings: int, seq_len: int | None = None) -> Tensor:
    """float32 [R/2] on the CPU. ``seq_len`` matters for ``dynamic`` and ``longrope`` only."""
    if rope.kind == "linear":
        return _plain(rope.theta, rope.rotary_size) / rope.options["factor"]
    if rope.kind == "dynamic":
        return _dynamic(rope, max_position_embeddings, seq_len)
    if rope.kind == "yarn":
        return _yarn(rope)
    if rope.kind == "llama3":
        return _llama3(rope)
    if rope.kind == "longrope":
        return _longrope(rope, seq_len)
    return _plain(rope.theta, rope.rotary_size)


def attention_factor(rope: RopeConfig) -> float:
    """What cosines and sines are multiplied by: the temperature of YaRN and LongRoPE, 1 for all other kinds."""
    if rope.kind not in ("yarn", "longrope"):
        return 1.0
    options = rope.options
    if options.get("attention_factor") is not None:
        return float(options["attention_factor"])
    if rope.kind == "longrope":
        factor, length = options["factor"], options["original_max_position_embeddings"]
        return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(length))
    mscale, mscale_all_dim = options.get("mscale"), options.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return _yarn_mscale(options["factor"], mscale) / _yarn_mscale(options["factor"], mscale_all_dim)
    return _yarn_mscale(options["factor"], 1.0)


def _plain(theta: float, rotary_size: int) -> Tensor:
    exponents = torch.arange(0, rotary_size, 2, dtype=torch.int64).float() / rotary_size
    return 1.0 / (theta**exponents)


def _dynamic(rope: RopeConfig, max_position_embeddings: int, seq_len: int | None) -> Tensor:
    """NTK-aware scaling whose base grows with the length of the sequence beyond the trained one."""
    length = max(seq_len or 0, max_position_embeddings)
    factor, size = rope.options["factor"], rope.rotary_size
    stretch = (factor * length / max_position_embeddings) - (factor - 1)
    return _plain(rope.theta * stretch ** (size / (size - 2)), size)


def _longrope(rope: RopeConfig, seq_len: int | None) -> Tensor:
    """LongRoPE (arXiv:2402.13753): a factor for each frequency, and others beyond the length of the pretraining."""
    is_long = (seq_len or 0) > rope.options["original_max_position_embeddings"]
    factors = torch.tensor(rope.options["long_factor" if is_long else "short_factor"], dtype=torch.float32)
    exponents = torch.arange(0, rope.rotary_size, 2, dtype=torch.int64).float() / rope.rotary_size
    return 1.0 / (factors * rope.theta**exponents)


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _yarn(rope: RopeConfig) -> Tensor:
    """YaRN (arXiv:2309.00071): interpolate slow frequencies, keep fast ones, a linear ramp in between."""
    options, size = rope.options, rope.rotary_size
    original = options["original_max_position_embeddings"]

    def dimension(rotations: float) -> float:
        return size * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(options.get("beta_fast") or 32), dimension(options.get("beta_slow") or 1)
    if options.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    width = (high - low) or 0.001
    keep = 1 - torch.clamp((torch.arange(size // 2, dtype=torch.float32) - low) / width, 0, 1)
    wavelengths = rope.theta ** (torch.arange(0, size, 2).float() / size)
    return 1.0 / (options["factor"] * wavelengths) * (1 - keep) + 1.0 / wavelengths * keep


def _llama3(rope: RopeConfig) -> Tensor:
    """Llama 3.1: divide slow frequencies by the factor, keep fast ones, blend those in between."""
    options = rope.options
    plain = _plain(rope.theta, rope.rotary_size)
    original = options["original_max_position_embeddings"]
    low, high, factor = options["low_freq_factor"], options["high_freq_factor"], options["factor"]
    wavelength = 2 * math.pi / plain
    smooth = (original / wavelength - low) / (high - low)
    blended = (1 - smooth) * plain / factor + smooth * plain
    scaled = torch.where(wavelength > original / low, plain / factor, blended)
    return torch.where(wavelength < original / high, plain, scaled)
