"""Families: what each architecture adds to the common decoder, and the values its config class assumes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from . import layer_windows
from .layer_windows import Windows

MIXTRAL_PROJECTIONS = ("w1", "w3", "w2")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertFamily:
    """A family whose feed-forward layers are mixtures of experts; the values stand for absent keys.

    ``size_key`` names the width of one expert. ``renormalizes``: the chosen experts' weights are made to add up to 1;
    None: ``norm_topk_prob`` says. ``shared_size``: every token also goes through a gated shared expert.
    """

    num_experts: int
    top_k: int
    size_key: str = "moe_intermediate_size"
    size: int | None = None
    renormalizes: bool | None = None
    shared_size: int | None = None
    block: str = "mlp"
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What an architecture adds to the common decoder, and the values its config class assumes when a key is absent.

    ``windows(raw, num_layers)`` gives the sliding window of each layer. ``qk_norm``: queries and keys are normalized,
    each head by itself or (``joint_qk_norm``) all heads together. ``query_scalar``: the config's query_pre_attn_scalar
    stands for the head size in the attention scale. ``soft_caps``: of attention scores and of logits, read from the
    config. ``local_theta``: layers with a window have a rotary embedding of their own. ``avoids_float16``: activations
    exceed float16, so that a checkpoint in float16 is computed in bfloat16.
    """

    model_type: str
    windows: Callable[[dict[str, Any], int], Windows] = layer_windows.none
    qkv_bias: bool = False
    reads_qkv_bias: bool = False
    reads_attention_bias: bool = False
    reads_mlp_bias: bool = False
    qk_norm: bool = False
    joint_qk_norm: bool = False
    head_size: int | None = None
    num_kv_heads: int | None = None
    norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    local_theta: float | None = None
    tied: bool = False
    activation: str = "silu"
    norm_offset: float = 0.0
    post_norms: bool = False
    scales_embedding: bool = False
    query_scalar: float | None = None
    soft_caps: tuple[float | None, float | None] | None = None
    fused_projections: bool = False
    avoids_float16: bool = False
    experts: ExpertFamily | None = None


_GELU = "gelu_pytorch_tanh"

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(model_type="llama", reads_attention_bias=True, reads_mlp_bias=True),
    "MistralForCausalLM": Family(model_type="mistral", windows=layer_windows.mistral, num_kv_heads=8),
    "MinistralForCausalLM": Family(model_type="ministral", windows=layer_windows.ministral, num_kv_heads=8),
    "MixtralForCausalLM": Family(
        model_type="mixtral",
        windows=layer_windows.uniform,
        num_kv_heads=8,
        norm_eps=1e-5,
        rope_theta=1e6,
        experts=ExpertFamily(
            num_experts=8,
            top_k=2,
            size_key="intermediate_size",
            renormalizes=True,
            block="block_sparse_moe",
            projections=MIXTRAL_PROJECTIONS,
        ),
    ),
    "Qwen2ForCausalLM": Family(model_type="qwen2", windows=layer_windows.qwen, qkv_bias=True, num_kv_heads=32),
    "Qwen2MoeForCausalLM": Family(
        model_type="qwen2_moe",
        windows=layer_windows.qwen2_moe,
        qkv_bias=True,
        reads_qkv_bias=True,
        num_kv_heads=16,
        experts=ExpertFamily(num_experts=60, top_k=4, size=1408, shared_size=5632),
    ),
    "Qwen3ForCausalLM": Family(
        model_type="qwen3",
        windows=layer_windows.qwen,
        reads_attention_bias=True,
        qk_norm=True,
        head_size=128,
        num_kv_heads=32,
    ),
    "Qwen3MoeForCausalLM": Family(
        model_type="qwen3_moe",
        windows=layer_windows.qwen3_moe,
        reads_attention_bias=True,
        qk_norm=True,
        num_kv_heads=4,
        experts=ExpertFamily(num_experts=128, top_k=8, size=768),
    ),
    "OlmoeForCausalLM": Family(
        model_type="olmoe",
        reads_attention_bias=True,
        qk_norm=True,
        joint_qk_norm=True,
        norm_eps=1e-5,
        experts=ExpertFamily(num_experts=64, top_k=8, size_key="intermediate_size"),
    ),
    "GemmaForCausalLM": Family(
        model_type="gemma",
        reads_attention_bias=True,
        head_size=256,
        num_kv_heads=16,
        tied=True,
        activation=_GELU,
        norm_offset=1.0,
        scales_embedding=True,
        avoids_float16=True,
    ),
    "Gemma2ForCausalLM": Family(
        model_type="gemma2",
        windows=layer_windows.gemma2,
        reads_attention_bias=True,
        head_size=256,
        num_kv_heads=4,
        tied=True,
        activation=_GELU,
        norm_offset=1.0,
        post_norms=True,
        scales_embedding=True,
        query_scalar=256.0,
        soft_caps=(50.0, 30.0),
        avoids_float16=True,
    ),
    "Gemma3ForCausalLM": Family(
        model_type="gemma3_text",
        windows=layer_windows.gemma3,
        reads_attention_bias=True,
        qk_norm=True,
        head_size=256,
        num_kv_heads=4,
        rope_theta=1e6,
        local_theta=10000.0,
        tied=True,
        activation=_GELU,
        norm_offset=1.0,
        post_norms=True,
        scales_embedding=True,
        query_scalar=256.0,
        soft_caps=(None, None),
        avoids_float16=True,
    ),
    "Phi3ForCausalLM": Family(model_type="phi3", windows=layer_windows.uniform, norm_eps=1e-5, fused_projections=True),
}
