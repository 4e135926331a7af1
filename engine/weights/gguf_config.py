"""A Hugging Face config made from a GGUF file's metadata."""

from __future__ import annotations

from typing import Any

from ...errors import UnsupportedError
from .gguf_file import GgufFile
from .gguf_rope import rope_parameters

# llama.cpp's architecture -> (Hugging Face architecture, model type). Mistral's files call themselves llama.
ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
}
DTYPE_NAMES = {"F32": "float32", "F16": "float16"}


def gguf_config(file: GgufFile) -> dict[str, Any]:
    """The config of a GGUF model as config.json would say it; UnsupportedError when its architecture is not served."""
    if file.architecture not in ARCHITECTURES:
        raise UnsupportedError(
            f"{file.path.name} has GGUF architecture {file.architecture!r}; served are {', '.join(ARCHITECTURES)}"
        )
    arch, prefix = ARCHITECTURES[file.architecture], file.architecture
    if file.value(f"{prefix}.expert_count", 0):
        raise UnsupportedError(f"{file.path.name} is a mixture of experts; only dense {prefix} GGUF files are served")
    heads = _uniform(file, f"{prefix}.attention.head_count")
    hidden = int(file.require(f"{prefix}.embedding_length"))
    config: dict[str, Any] = {
        "architectures": [arch[0]],
        "model_type": arch[1],
        "vocab_size": file.shape("token_embd.weight")[0],
        "hidden_size": hidden,
        "intermediate_size": _uniform(file, f"{prefix}.feed_forward_length"),
        "num_hidden_layers": int(file.require(f"{prefix}.block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": _uniform(file, f"{prefix}.attention.head_count_kv", heads),
        "head_dim": int(file.value(f"{prefix}.attention.key_length", hidden // heads)),
        "hidden_act": "silu",
        "max_position_embeddings": int(file.require(f"{prefix}.context_length")),
        "rms_norm_eps": _short(file.require(f"{prefix}.attention.layer_norm_rms_epsilon")),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "dtype": _weight_dtype(file),
    }
    config |= {key: value for key, value in _token_ids(file).items() if value is not None}
    config |= _attention_extras(file, config)
    config["rope_parameters"] = rope_parameters(file, config["head_dim"])
    return config


def _uniform(file: GgufFile, key: str, default: int | None = None) -> int:
    """A number that newer files may give per layer; only equal layers are served."""
    value = file.value(key, default) if default is not None else file.require(key)
    values = value if isinstance(value, list) else [value]
    if len(set(values)) != 1:
        raise UnsupportedError(f"{file.path.name} has a different {key} per layer; only equal layers are served")
    return int(values[0])


def _short(value: float) -> float:
    """1e-05 for the float32 that is nearest to it."""
    return float(f"{value:.6g}")


def _weight_dtype(file: GgufFile) -> str:
    return DTYPE_NAMES.get(file.tensors["token_embd.weight"].tensor_type.name, "bfloat16")


def _token_ids(file: GgufFile) -> dict[str, Any]:
    ends = [file.value(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    eos = list(dict.fromkeys(int(token) for token in ends if token is not None))
    return {
        "bos_token_id": file.value("tokenizer.ggml.bos_token_id"),
        "pad_token_id": file.value("tokenizer.ggml.padding_token_id"),
        "eos_token_id": (eos[0] if len(eos) == 1 else eos) if eos else None,
    }


def _attention_extras(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    extras: dict[str, Any] = {}
    window = file.value(f"{file.architecture}.attention.sliding_window")
    if file.architecture == "llama":
        extras |= {
            "attention_bias": "blk.0.attn_output.bias" in file.tensors,
            "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        }
        if window:
            extras |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": int(window)}
    elif window:
        extras |= {"use_sliding_window": True, "sliding_window": int(window), "max_window_layers": 0}
    return extras
