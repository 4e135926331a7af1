"""Random Llama checkpoints of any size and format, written without a model in memory: for loading, not for meaning."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

GROUP = 128
CONFIGS: dict[str, dict[str, object] | None] = {
    "bf16": None,
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False, "desc_act": False},
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
}


def build_sized_model(
    folder: Path,
    kind: str,
    *,
    layers: int,
    hidden: int,
    inner: int,
    vocab: int,
    kv_heads: int | None = None,
    positions: int = 512,
) -> Path:
    """``kind``: bf16, gptq (4 bits, asymmetric) or fp8 (128x128 blocks). Heads of 64, that of the vocabulary untied.

    Two shards.
    """
    heads = hidden // 64
    kv_heads = kv_heads or heads
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": positions,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    if CONFIGS[kind] is not None:
        config["quantization_config"] = CONFIGS[kind]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    plain = {
        "model.embed_tokens.weight": _matrix(vocab, hidden),
        "lm_head.weight": _matrix(vocab, hidden),
        "model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16),
    }
    shards: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, plain)
    shapes = {f"self_attn.{name}_proj": (hidden, hidden) for name in "qo"}
    shapes |= {f"self_attn.{name}_proj": (64 * kv_heads, hidden) for name in "kv"}
    shapes |= {"mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner)}
    for layer in range(layers):
        prefix, shard = f"model.layers.{layer}", shards[layer * 2 // layers]
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shard[f"{prefix}.{norm}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
        for module, shape in shapes.items():
            shard |= {f"{prefix}.{module}.{part}": tensor for part, tensor in _WRITERS[kind](*shape).items()}
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file(shard, folder / file)
        weight_map |= dict.fromkeys(shard, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def _matrix(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns).mul_(0.02).bfloat16()


def _plain(rows: int, columns: int) -> dict[str, Tensor]:
    return {"weight": _matrix(rows, columns)}


def _words(*shape: int) -> Tensor:
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int64).to(torch.int32)


def _gptq(rows: int, columns: int) -> dict[str, Tensor]:
    groups = columns // GROUP
    return {
        "qweight": _words(columns // 8, rows),
        "qzeros": _words(groups, rows // 8),
        "scales": torch.full((groups, rows), 0.003, dtype=torch.float16),
        "g_idx": (torch.arange(columns) // GROUP).to(torch.int32),
    }


def _fp8(rows: int, columns: int) -> dict[str, Tensor]:
    codes = torch.randn(rows, columns).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale_inv": torch.full((-(-rows // 128), -(-columns // 128)), 0.02)}


_WRITERS = {"bf16": _plain, "gptq": _gptq, "fp8": _fp8}
