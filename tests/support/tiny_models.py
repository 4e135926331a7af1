"""Small random checkpoints of each model family, written by transformers, which is also their judge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from chain_model import ChainTokenizer

VOCAB_SIZE = 320
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

BASE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": 256,
    "pad_token_id": None,
    "torch_dtype": "float32",
}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"tie_word_embeddings": False}),
    "llama-tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "llama-linear": ("LlamaConfig", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "llama-dynamic": ("LlamaConfig", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
    "llama-yarn": (
        "LlamaConfig",
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}},
    ),
    "llama-llama3": (
        "LlamaConfig",
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "llama-bias": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("MistralConfig", {"sliding_window": 24, "head_dim": 32}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen2-window": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1, "tie_word_embeddings": False},
    ),
    "qwen3": ("Qwen3Config", {"head_dim": 32, "tie_word_embeddings": False}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 24}),
    "qwen2-moe": (
        "Qwen2MoeConfig",
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 48,
            "mlp_only_layers": [0],
            "num_hidden_layers": 3,
            "tie_word_embeddings": False,
        },
    ),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        {
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "head_dim": 32,
            "norm_topk_prob": True,
            "decoder_sparse_step": 2,
            "tie_word_embeddings": False,
        },
    ),
    "olmoe": ("OlmoeConfig", {"num_experts": 5, "num_experts_per_tok": 3}),
    "gemma": ("GemmaConfig", {"head_dim": 32}),
    "gemma2": (
        "Gemma2Config",
        {
            "head_dim": 32,
            "sliding_window": 24,
            "query_pre_attn_scalar": 20,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "head_dim": 32,
            "sliding_window": 24,
            "query_pre_attn_scalar": 20,
            "num_hidden_layers": 3,
            "sliding_window_pattern": 2,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "phi3-longrope": (
        "Phi3Config",
        {
            "pad_token_id": 0,
            "original_max_position_embeddings": 64,
            "max_position_embeddings": 256,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
                "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0],
            },
        },
    ),
    "phi3": ("Phi3Config", {"sliding_window": 24, "pad_token_id": 0, "tie_word_embeddings": False}),
}


def build_tiny_model(directory: Path, family: str = "llama", *, seed: int = 0, **overrides: Any) -> Path:
    """Write a seeded random model of ``family`` with a byte-level tokenizer (ids 0..255 bytes, 256 EOS)."""
    config_class, options = FAMILIES[family]
    config = getattr(transformers, config_class)(**{**BASE, **options, **overrides})
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # transformers starts biases at zero, which would hide a lost one
                parameter.normal_(0.0, 0.2)
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.generation_config = transformers.GenerationConfig(eos_token_id=256)
    model.save_pretrained(directory)
    ChainTokenizer(specials=["<|im_start|>", "<|im_end|>"]).save(directory, CHAT_TEMPLATE)
    return directory


def judge(directory: Path) -> transformers.PreTrainedModel:
    """transformers' own float32 model of a checkpoint: the independent definition of its logits and tokens."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    ).eval()


@torch.inference_mode()
def judge_logits(model: transformers.PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    """float32 [T, vocabulary] of one sequence."""
    return model(torch.tensor([token_ids])).logits[0].float()


@torch.inference_mode()
def judge_greedy(model: transformers.PreTrainedModel, token_ids: list[int], num_tokens: int) -> list[int]:
    """``num_tokens`` greedy tokens after a prompt, end of text ignored, recomputing everything at each step."""
    tokens = list(token_ids)
    for _ in range(num_tokens):
        tokens.append(int(judge_logits(model, tokens)[-1].argmax()))
    return tokens[len(token_ids) :]
