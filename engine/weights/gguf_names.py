"""Tensor names: llama.cpp's in a GGUF file, Hugging Face's everywhere else."""

from __future__ import annotations

import re

TOP_LEVEL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
PER_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_TOP = re.compile(r"(\w+)\.(weight|bias)")


def hf_name(gguf_name: str) -> str | None:
    """The Hugging Face name of a GGUF tensor; None when a decoder has no such parameter."""
    layer = _LAYER.fullmatch(gguf_name)
    if layer is not None:
        number, module, kind = layer.groups()
        return f"model.layers.{number}.{PER_LAYER[module]}.{kind}" if module in PER_LAYER else None
    top = _TOP.fullmatch(gguf_name)
    if top is not None and top[1] in TOP_LEVEL:
        return f"{TOP_LEVEL[top[1]]}.{top[2]}"
    return None
