"""The text model's config inside that of a model which also reads images."""

from __future__ import annotations

from typing import Any

# What Gemma 3's text config assumes for keys that the hub's configs leave out.
_GEMMA3 = {
    "model_type": "gemma3_text",
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "max_position_embeddings": 131_072,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "pad_token_id": 0,
}
# Architecture of the whole -> (the text model's, its defaults).
_TEXT_MODELS = {"Gemma3ForConditionalGeneration": ("Gemma3ForCausalLM", _GEMMA3)}
# Keys of the whole that count for its text model as well.
_SHARED = ("eos_token_id", "bos_token_id", "pad_token_id", "dtype", "torch_dtype", "quantization_config")


def text_config(raw: dict[str, Any]) -> dict[str, Any]:
    """``raw`` itself, or as the config of its text model alone."""
    found = _TEXT_MODELS.get((raw.get("architectures") or [""])[0])
    if found is None:
        return raw
    architecture, defaults = found
    shared = {key: raw[key] for key in _SHARED if raw.get(key) is not None}
    return {**defaults, **(raw.get("text_config") or {}), **shared, "architectures": [architecture]}
