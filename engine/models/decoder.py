"""The pre-norm decoder of Llama, Mistral, Qwen2 and Qwen3; the config says which parts a model has."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...kernels.attention_batch import AttentionBatch
from ...kernels.kv_layout import KVCache
from ...kernels.problems import AttentionProblem
from ..layers.attention import Attention
from ..layers.embedding import Head
from ..layers.mlp import GatedMLP, gated_activation
from ..layers.norm import RMSNorm
from ..layers.rope import RotaryEmbedding, Rotation
from ..model_config import ModelConfig
from ..weights.loader import Loader


class DecoderLayer:
    """``x += attention(norm(x)); x += mlp(norm(x))``, with each sum fused into the norm that follows it."""

    def __init__(self, config: ModelConfig, index: int, block_size: int, rope: RotaryEmbedding, loader: Loader) -> None:
        prefix = f"model.layers.{index}"
        self._attention_norm = loader.norm(f"{prefix}.input_layernorm", config.hidden_size, config.norm_eps)
        self._attention = _attention(config, index, block_size, rope, loader)
        self._mlp_norm = loader.norm(f"{prefix}.post_attention_layernorm", config.hidden_size, config.norm_eps)
        self._mlp = _mlp(config, f"{prefix}.mlp", loader)

    def __call__(
        self,
        x: Tensor,
        residual: Tensor | None,
        rotation: Rotation,
        kv_cache: KVCache,
        batch: AttentionBatch,
    ) -> tuple[Tensor, Tensor]:
        """(x, residual), both [T,K], whose sum is the layer's output; ``residual`` is None in the first layer."""
        if residual is None:
            normed, residual = self._attention_norm(x), x
        else:
            normed, residual = self._attention_norm.add(x, residual)
        mixed = self._attention(normed, rotation, kv_cache, batch)
        normed, residual = self._mlp_norm.add(mixed, residual)
        return self._mlp(normed), residual


class Decoder:
    """A whole model; satisfies ``Model``. ``progress(done, total)`` is called after each layer."""

    def __init__(
        self,
        config: ModelConfig,
        loader: Loader,
        *,
        block_size: int,
        num_positions: int,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self.config = config
        self.dtype = loader.dtype
        self.kv_heads = config.num_kv_heads
        self.head_size = config.head_size
        self.num_layers = config.num_layers
        rope = RotaryEmbedding(
            config.rope, config.max_position_embeddings, num_positions, loader.dtype, loader.device, loader.kernels
        )
        self._embedding = loader.embedding("model.embed_tokens", config.vocab_size, config.hidden_size)
        self._rope = rope
        self._layers = []
        for index in range(config.num_layers):
            self._layers.append(DecoderLayer(config, index, block_size, rope, loader))
            if progress is not None:
                progress(index + 1, config.num_layers)
        self._norm: RMSNorm = loader.norm("model.norm", config.hidden_size, config.norm_eps)
        if config.tie_word_embeddings:
            self._head = Head(loader.tied_head("lm_head", self._embedding))
        else:
            self._head = Head(loader.linear({"lm_head": config.vocab_size}, config.hidden_size, bias=False))
        self.weight_bytes = loader.weight_bytes
        self.memory_bytes = loader.memory_bytes
        self.kv_scales = loader.kv_scales

    @torch.inference_mode()
    def forward(self, input_ids: Tensor, positions: Tensor, kv_caches: list[KVCache], batch: AttentionBatch) -> Tensor:
        x, residual = self._embedding(input_ids), None
        rotation = self._rope.rotation(positions, batch)
        for layer, kv_cache in zip(self._layers, kv_caches, strict=True):
            x, residual = layer(x, residual, rotation, kv_cache, batch)
        assert residual is not None, "a decoder has at least one layer"
        return self._norm.add(x, residual)[0]

    @torch.inference_mode()
    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self._head(hidden)


def _attention(config: ModelConfig, index: int, block_size: int, rope: RotaryEmbedding, loader: Loader) -> Attention:
    prefix = f"model.layers.{index}.self_attn"
    hidden, size = config.hidden_size, config.head_size
    q_size, kv_size = config.num_heads * size, config.num_kv_heads * size
    qkv = {f"{prefix}.q_proj": q_size, f"{prefix}.k_proj": kv_size, f"{prefix}.v_proj": kv_size}
    problem = AttentionProblem(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_size=size,
        block_size=block_size,
        dtype=loader.dtype,
        kv_dtype=loader.dtype,
        sliding_window=config.layer_windows[index],
    )
    norms = [loader.norm(f"{prefix}.{name}", size, config.norm_eps) for name in ("q_norm", "k_norm") if config.qk_norm]
    return Attention(
        loader.linear(qkv, hidden, bias=config.qkv_bias),
        loader.linear({f"{prefix}.o_proj": hidden}, q_size, bias=config.output_bias),
        rope,
        problem,
        loader.kernels,
        *norms,
    )


def _mlp(config: ModelConfig, prefix: str, loader: Loader) -> GatedMLP:
    hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
    gate_up = loader.linear({f"{prefix}.gate_proj": inner, f"{prefix}.up_proj": inner}, hidden, bias=bias)
    down = loader.linear({f"{prefix}.down_proj": hidden}, inner, bias=bias)
    return GatedMLP(gate_up, down, gated_activation(config.hidden_act, loader.dtype, loader.kernels))
