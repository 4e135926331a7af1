"""ModelConfig: the shape of a decoder, read from a Hugging Face config and independent of where that came from."""

from __future__ import annotations

import contextlib
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .sources.model_files import ModelFiles
from .text_config import text_config


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding. ``kind`` is default, linear, dynamic, yarn or llama3; ``options`` as in the HF config."""

    theta: float = 10000.0
    kind: str = "default"
    rotary_size: int
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """Mixtures of experts in place of the feed-forward layers for which ``layers`` says so.

    ``intermediate_size`` is one expert's. ``renormalize``: the weights of the ``top_k`` chosen experts are made to add
    up to 1. ``shared_size``: the width of an expert that every token goes through, under a gate of its own.
    ``block`` and ``projections`` (gate, up, down) are the names in the checkpoint.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    renormalize: bool
    layers: tuple[bool, ...]
    shared_size: int | None = None
    block: str = "mlp"
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")

    @property
    def width(self) -> int:
        """Intermediate features that one token passes through in such a layer."""
        return self.top_k * self.intermediate_size + (self.shared_size or 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """One decoder-only transformer.

    ``layer_windows`` has one entry per layer: the sliding window in tokens (a token sees itself and window-1 before),
    or None for full attention. ``local_rope`` is the rotary embedding of layers with a window, where it is another one.
    ``qk_norm``: queries and keys are normalized, each head by itself or (``joint_qk_norm``) all heads together.
    ``norm_offset`` is added to every norm's weight; ``post_norms``: the outputs of attention and feed-forward layer are
    normalized too. Attention scores are scaled by ``query_scalar ** -0.5`` (None: the head size). Soft caps are 0.0
    where there are none. ``fused_projections``: q, k and v, and gate and up, are one tensor each in the checkpoint.
    ``eos_token_ids`` joins config.json, generation_config.json and the tokenizer.
    ``num_labels`` above 0: a classifier of the last token's hidden state stands in place of the head.
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
    joint_qk_norm: bool = False
    hidden_act: str = "silu"
    local_rope: RopeConfig | None = None
    norm_offset: float = 0.0
    post_norms: bool = False
    embedding_scale: float = 1.0
    query_scalar: float | None = None
    attention_soft_cap: float = 0.0
    logit_soft_cap: float = 0.0
    fused_projections: bool = False
    experts: ExpertsConfig | None = None
    num_labels: int = 0
    dtype: str = "float32"
    eos_token_ids: frozenset[int] = frozenset()
    quantization: dict[str, Any] | None = None
    generation: dict[str, Any] = field(default_factory=dict)

    @property
    def mlp_width(self) -> int:
        """Intermediate features per token of the widest feed-forward layer."""
        if self.experts is None:
            return self.intermediate_size
        mixed = self.experts.width if any(self.experts.layers) else 0
        return mixed if all(self.experts.layers) else max(mixed, self.intermediate_size)


def raw_config(files: ModelFiles) -> dict[str, Any]:
    """The model's config as config.json says it, of its text model where it reads images too; of a GGUF file, as
    config.json would."""
    if files.kind == "gguf":
        from .weights.gguf_config import gguf_config
        from .weights.gguf_file import open_gguf

        return gguf_config(open_gguf(files.path))
    return text_config(read_json(files.path / "config.json"))


def load_model_config(files: ModelFiles) -> ModelConfig:
    """The validated config. ConfigError names a wrong value, UnsupportedError a model that is not served."""
    from .hf_config import parse_config

    raw = raw_config(files)
    if files.kind == "gguf":
        return parse_config(raw, source=files.path.name, generation=generation_config(files))
    quantization = _quantization(files.path, raw)
    return parse_config(
        raw,
        source=str(files.path / "config.json"),
        quantization=quantization,
        generation=generation_config(files),
        tokenizer_eos=_tokenizer_eos(files.path),
    )


def generation_config(files: ModelFiles) -> dict[str, Any]:
    """generation_config.json of a folder, or the sampling defaults that came with the files; empty without either.

    Read apart from the whole config, which would bring torch into a server's process.
    """
    path = files.path / "generation_config.json"
    return read_json(path) if files.kind == "directory" and path.is_file() else dict(files.generation)


def allowed_model_len(wanted: int | None, model: ModelConfig) -> int:
    """Tokens of the longest sequence, the model's unless wanted; ConfigError where it has no positions for them."""
    limit = model.max_position_embeddings
    if wanted is None:
        return limit
    if wanted > limit and model.rope.kind != "dynamic":  # dynamic scaling grows with the sequence
        raise ConfigError(f"max_model_len is {wanted}; this model has positions for {limit} tokens; ask for that")
    return wanted


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; ConfigError when it is not one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds {type(value).__name__}, not a JSON object")
    return value


def _quantization(directory: Path, raw: dict[str, Any]) -> dict[str, Any] | None:
    from ..quant.formats import read_quantization

    return read_quantization(directory, raw)


def _tokenizer_eos(directory: Path) -> int | None:
    """The id of the tokenizer's end-of-text token, where the tokenizer's side files give one."""
    config = directory / "tokenizer_config.json"
    if not config.is_file():
        return None
    settings = read_json(config)
    eos = settings.get("eos_token")
    text = eos.get("content") if isinstance(eos, dict) else eos
    if not isinstance(text, str):
        return None
    for token_id, token in (settings.get("added_tokens_decoder") or {}).items():
        if token.get("content") == text:
            return int(token_id)
    return _added_token_id(directory / "tokenizer.json", text)


def _added_token_id(path: Path, text: str) -> int | None:
    for token in _added_tokens(path) if path.is_file() else []:
        if token.get("content") == text:
            return int(token["id"])
    return None


def _added_tokens(path: Path) -> list[dict[str, Any]]:
    """The list of a tokenizer.json alone where it can be found: decoding a whole vocabulary takes half a second."""
    source = path.read_text(encoding="utf-8", errors="replace")
    found = re.search(r'"added_tokens"\s*:\s*(?=\[\s*[{\]])', source)
    if found is not None:
        with contextlib.suppress(ValueError):
            return list(json.JSONDecoder().raw_decode(source, found.end())[0])
    return read_json(path).get("added_tokens") or []
