"""The parts of a decoder layer, as the config says: attention, feed-forward layer, mixture of experts."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ...kernels.problems import AttentionProblem, MoeRouteProblem
from ..layers.attention import Attention
from ..layers.mlp import GatedMLP, gated_activation, plain_activation
from ..layers.moe import MixtureOfExperts, SharedExpert
from ..layers.norm import RMSNorm
from ..layers.rope import RotaryEmbedding
from ..model_config import ExpertsConfig, ModelConfig
from ..weights.loader import Loader

FeedForward = Callable[..., Tensor]


def norm(config: ModelConfig, module: str, loader: Loader) -> RMSNorm:
    """A norm of the hidden states."""
    return loader.norm(module, config.hidden_size, config.norm_eps, config.norm_offset)


def attention(config: ModelConfig, index: int, block_size: int, rope: RotaryEmbedding, loader: Loader) -> Attention:
    """The attention of one layer."""
    prefix = f"model.layers.{index}.self_attn"
    hidden, size = config.hidden_size, config.head_size
    q_size, kv_size = config.num_heads * size, config.num_kv_heads * size
    qkv = {f"{prefix}.q_proj": q_size, f"{prefix}.k_proj": kv_size, f"{prefix}.v_proj": kv_size}
    if config.fused_projections:
        qkv = {f"{prefix}.qkv_proj": q_size + 2 * kv_size}
    problem = AttentionProblem(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_size=size,
        block_size=block_size,
        dtype=loader.dtype,
        kv_dtype=loader.kv_cache.dtype,
        sliding_window=config.layer_windows[index],
        soft_cap=config.attention_soft_cap,
    )
    q_norm = k_norm = None
    if config.qk_norm:
        q_width, k_width = (q_size, kv_size) if config.joint_qk_norm else (size, size)
        q_norm = loader.norm(f"{prefix}.q_norm", q_width, config.norm_eps, config.norm_offset)
        k_norm = loader.norm(f"{prefix}.k_norm", k_width, config.norm_eps, config.norm_offset)
    return Attention(
        loader.linear(qkv, hidden, bias=config.qkv_bias, is_sensitive=True),
        loader.linear({f"{prefix}.o_proj": hidden}, q_size, bias=config.output_bias),
        rope,
        problem,
        loader.kernels,
        (config.query_scalar or size) ** -0.5,
        q_norm,
        k_norm,
    )


def feed_forward(config: ModelConfig, index: int, loader: Loader) -> FeedForward:
    """The feed-forward part of one layer."""
    prefix = f"model.layers.{index}"
    if config.experts is not None and config.experts.layers[index]:
        block = config.experts.block
        if not loader.checkpoint.has(f"{prefix}.{block}.gate.weight"):
            block = "mlp"  # what transformers 5 calls it in every family
        return mixture_of_experts(config, config.experts, f"{prefix}.{block}", loader)
    return gated_mlp(config, f"{prefix}.mlp", config.intermediate_size, loader)


def mixture_of_experts(config: ModelConfig, shape: ExpertsConfig, prefix: str, loader: Loader) -> MixtureOfExperts:
    """A router, its experts, and the shared expert of models that have one."""
    hidden, inner = config.hidden_size, shape.intermediate_size
    gate, up, down = shape.projections
    counts = {"num_experts": shape.num_experts, "top_k": shape.top_k}
    shared = None
    if shape.shared_size is not None:
        shared = SharedExpert(
            gated_mlp(config, f"{prefix}.shared_expert", shape.shared_size, loader),
            loader.linear({f"{prefix}.shared_expert_gate": 1}, hidden, bias=False),
            loader.dtype,
            loader.kernels,
        )
    return MixtureOfExperts(
        loader.linear({f"{prefix}.gate": shape.num_experts}, hidden, bias=False),
        loader.experts(f"{prefix}.experts", {gate: inner, up: inner}, hidden, **counts),
        loader.experts(f"{prefix}.experts", {down: hidden}, inner, **counts),
        plain_activation(config.hidden_act, loader.dtype, loader.kernels),
        MoeRouteProblem(**counts, dtype=loader.dtype),
        loader.kernels,
        renormalize=shape.renormalize,
        shared=shared,
    )


def gated_mlp(config: ModelConfig, prefix: str, inner: int, loader: Loader) -> GatedMLP:
    """``inner`` intermediate features."""
    hidden, bias = config.hidden_size, config.mlp_bias
    parts = {f"{prefix}.gate_proj": inner, f"{prefix}.up_proj": inner}
    if config.fused_projections:
        parts = {f"{prefix}.gate_up_proj": 2 * inner}
    gate_up = loader.linear(parts, hidden, bias=bias)
    down = loader.linear({f"{prefix}.down_proj": hidden}, inner, bias=bias)
    activation = gated_activation(config.hidden_act, loader.dtype, loader.kernels, down.input_format)
    return GatedMLP(gate_up, down, activation, gate_up.gated(config.hidden_act, down.input_format))
