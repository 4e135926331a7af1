"""ModelConfig: the shape of a decoder, read from a Hugging Face config and independent of where that came from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding. ``kind`` is default, linear, dynamic, yarn or llama3; ``options`` as in the HF config."""

    theta: float = 10000.0
    kind: str = "default"
    rotary_size: int
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """One decoder-only transformer.

    ``layer_windows`` has one entry per layer: the sliding window in tokens (a token sees itself and window-1 before it),
    or None for full attention. ``eos_token_ids`` joins config.json, generation_config.json and the tokenizer.
    ``generation`` holds the sampling defaults that the model's authors ship (temperature, top_k, ...).
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    layer_windows: tuple[int | None, ...]
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    hidden_act: str = "silu"
    dtype: str = "float32"
    eos_token_ids: frozenset[int] = frozenset()
    quantization: dict[str, Any] | None = None
    generation: dict[str, Any] = field(default_factory=dict)
