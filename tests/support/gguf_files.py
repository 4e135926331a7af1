"""Small GGUF files, written with the gguf package from tiny checkpoints, as llama.cpp's converter lays them out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, quantize
from safetensors.torch import load_file

NAMES = {
    "embed_tokens": "token_embd",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def permute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp's row order for q and k of the llama architecture: row i of one half next to row i of the other."""
    rows = []
    size = weight.shape[0] // num_heads
    for head in range(num_heads):
        for i in range(size // 2):
            rows += [head * size + i, head * size + size // 2 + i]
    return weight[rows]


def gguf_name(name: str) -> str:
    """llama.cpp's tensor name."""
    module, kind = name.rsplit(".", 1)
    if name.startswith("lm_head"):
        return f"output.{kind}"
    if name == "model.norm.weight":
        return "output_norm.weight"
    if name.startswith("model.embed_tokens"):
        return f"token_embd.{kind}"
    _, _, layer, rest = module.split(".", 3)
    return f"blk.{layer}.{NAMES[rest]}.{kind}"


def write_gguf(directory: Path, target: Path, arch: str, *, quantization: str = "F32", **metadata: Any) -> Path:
    """Convert a tiny checkpoint; ``metadata`` adds keys, with ``__`` for dots after the architecture."""
    config = json.loads((directory / "config.json").read_text())
    writer = GGUFWriter(target, arch)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_size = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_rope_dimension_count(head_size)
    writer.add_key_length(head_size)
    add_metadata(writer, {f"{arch}.{key.replace('__', '.')}": value for key, value in metadata.items()})
    add_byte_vocabulary(writer, config["vocab_size"])
    for name, tensor in load_file(directory / "model.safetensors").items():
        data = tensor.float().numpy()
        if arch == "llama" and (".q_proj." in name or ".k_proj." in name):
            data = permute(data, heads if ".q_proj." in name else kv_heads)
        kind = GGMLQuantizationType[quantization if data.ndim == 2 else "F32"]
        writer.add_tensor(gguf_name(name), quantize(data, kind), raw_dtype=kind)
    return _finish(writer, target)


def add_metadata(writer: GGUFWriter, values: dict[str, Any]) -> None:
    for key, value in values.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)


def add_byte_vocabulary(writer: GGUFWriter, size: int) -> None:
    """GPT-2 style: the bytes in the alphabet's own order, a merge, then padding tokens."""
    from chain_model import byte_alphabet

    tokens = [*byte_alphabet().values(), "<|end|>", "th"]
    tokens += [f"<pad{i}>" for i in range(size - len(tokens))]
    types = [1] * 256 + [3, 1] + [3] * (size - 258)
    add_metadata(
        writer,
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "smollm",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": types,
            "tokenizer.ggml.merges": ["t h"],
            "tokenizer.ggml.eos_token_id": 256,
        },
    )


def write_vocabulary(target: Path, values: dict[str, Any], tokens: Sequence[str]) -> Path:
    """A file that holds nothing but a tokenizer."""
    writer = GGUFWriter(target, "llama")
    add_metadata(writer, {"tokenizer.ggml.tokens": list(tokens), **values})
    writer.add_tensor("token_embd.weight", np.zeros((len(tokens), 4), dtype=np.float32))
    return _finish(writer, target)


def _finish(writer: GGUFWriter, target: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target
