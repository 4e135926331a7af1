"""The decoder of every family: pre-norm layers of attention and feed-forward; the config says which parts they have."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...kernels.attention_batch import AttentionBatch
from ...kernels.kv_layout import KVCache
from ...kernels.quantized_input import QuantizedInput
from ..layers.embedding import Embedding, Head
from ..layers.label_head import LabelHead
from ..layers.mlp import GatedMLP
from ..layers.output_rows import OutputRows
from ..layers.rope import RotaryEmbedding, Rotation
from ..model_config import ModelConfig
from ..weights.loader import Loader
from .blocks import attention, feed_forward, norm

HEAD = "lm_head"


class DecoderLayer:
    """``x += attention(norm(x)); x += mlp(norm(x))``, with each sum fused into the norm that follows it.

    With ``post_norms`` the outputs of attention and feed-forward layer are normalized before they are added.
    """

    def __init__(self, config: ModelConfig, index: int, block_size: int, rope: RotaryEmbedding, loader: Loader) -> None:
        prefix = f"model.layers.{index}"
        mlp_norm = "pre_feedforward_layernorm" if config.post_norms else "post_attention_layernorm"
        attention_norm = norm(config, f"{prefix}.input_layernorm", loader)
        self._attention = attention(config, index, block_size, rope, loader)
        self._attention_norm = attention_norm.feeding(self._attention.input_format)
        before_mlp = norm(config, f"{prefix}.{mlp_norm}", loader)
        self._mlp = feed_forward(config, index, loader)
        # A mixture's router wants the values themselves.
        self._mlp_norm = before_mlp.feeding(self._mlp.input_format if isinstance(self._mlp, GatedMLP) else None)
        self._after_attention = self._after_mlp = None
        if config.post_norms:
            self._after_attention = norm(config, f"{prefix}.post_attention_layernorm", loader)
            self._after_mlp = norm(config, f"{prefix}.post_feedforward_layernorm", loader)

    def attention_input(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor | QuantizedInput, Tensor]:
        """(norm(x + residual), x + residual); ``residual`` None: in the first layer. What was given may be overwritten.

        Each half of a layer takes two calls, so that nobody needs to hold x while it is computed.
        """
        return (self._attention_norm(x), x) if residual is None else self._attention_norm.add(x, residual)

    def attend(
        self,
        normed: Tensor | QuantizedInput,
        residual: Tensor,
        rotation: Rotation,
        kv_cache: KVCache,
        batch: AttentionBatch,
    ) -> tuple[Tensor, Tensor]:
        """The layer's first half: (x, residual), both [T,K], whose sum goes on."""
        return self._mixed(self._attention(normed, rotation, kv_cache, batch)), residual

    def queries(
        self, normed: Tensor | QuantizedInput, rotation: Rotation, kv_cache: KVCache, batch: AttentionBatch
    ) -> Tensor:
        """In place of ``attend`` its beginning, up to the queries [T,H,D]; keys and values are in the cache."""
        return self._attention.queries(normed, rotation, kv_cache, batch)

    def attend_outputs(
        self, queries: Tensor, residual: Tensor, kv_cache: KVCache, outputs: OutputRows
    ) -> tuple[Tensor, Tensor]:
        """The rest of ``attend`` for the rows ``outputs`` alone, [R,K]."""
        residual = residual[outputs.index]
        if not len(residual):
            return residual, residual
        return self._mixed(self._attention.attend(queries[outputs.index], kv_cache, outputs.batch)), residual

    def _mixed(self, mixed: Tensor) -> Tensor:
        return mixed if self._after_attention is None else self._after_attention(mixed)

    def mlp_input(self, x: Tensor, residual: Tensor) -> tuple[Tensor | QuantizedInput, Tensor]:
        """The same as ``attention_input``, for the second half."""
        return self._mlp_norm.add(x, residual)

    def feed_forward(self, normed: Tensor | QuantizedInput) -> Tensor:
        """The second half: what is added to the residual."""
        out = self._mlp(normed)
        return out if self._after_mlp is None else self._after_mlp(out)


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
        self._ropes = _ropes(config, num_positions, loader)
        self._rope_of = [int(window is not None and len(self._ropes) > 1) for window in config.layer_windows]
        self._embedding = loader.embedding(
            "model.embed_tokens",
            config.vocab_size,
            config.hidden_size,
            config.embedding_scale,
            tied_head=HEAD if config.tie_word_embeddings and not config.num_labels else None,
        )
        self._layers = []
        for index, rope in enumerate(self._rope_of):
            self._layers.append(DecoderLayer(config, index, block_size, self._ropes[rope], loader))
            if progress is not None:
                progress(index + 1, config.num_layers)
        self._norm = norm(config, "model.norm", loader)
        self._head = _head(config, loader, self._embedding)
        self.weight_bytes = loader.weight_bytes
        self.memory_bytes = loader.memory_bytes
        self.kv_dtype = loader.kv_cache.dtype
        self.kv_scales = loader.kv_scales

    @torch.inference_mode()
    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_caches: list[KVCache],
        batch: AttentionBatch,
        outputs: OutputRows | None = None,
    ) -> Tensor:
        if outputs is not None:
            return self.finish(*self.begin(input_ids, positions, kv_caches, batch), kv_caches, outputs)
        return self._final_norm(*self._through(len(self._layers), input_ids, positions, kv_caches, batch)[:2])

    @torch.inference_mode()
    def begin(
        self, input_ids: Tensor, positions: Tensor, kv_caches: list[KVCache], batch: AttentionBatch
    ) -> tuple[Tensor, Tensor]:
        last = len(self._layers) - 1
        x, residual, rotations = self._through(last, input_ids, positions, kv_caches, batch)
        layer, rotation = self._layers[last], rotations[self._rope_of[last]]
        normed, residual = layer.attention_input(x, residual)
        del x
        return layer.queries(normed, rotation, kv_caches[last], batch), residual

    @torch.inference_mode()
    def finish(self, queries: Tensor, residual: Tensor, kv_caches: list[KVCache], outputs: OutputRows) -> Tensor:
        layer = self._layers[-1]
        x, residual = layer.attend_outputs(queries, residual, kv_caches[-1], outputs)
        if not len(x):
            return x
        normed, residual = layer.mlp_input(x, residual)
        return self._final_norm(layer.feed_forward(normed), residual)

    def _through(
        self, count: int, input_ids: Tensor, positions: Tensor, kv_caches: list[KVCache], batch: AttentionBatch
    ) -> tuple[Tensor, Tensor | None, list[Rotation]]:
        """What the first ``count`` layers hand on, x and residual, and the rotations of this step."""
        x, residual = self._embedding(input_ids), None
        rotations = [rope.rotation(positions, batch) for rope in self._ropes]
        for layer, rope, kv_cache in zip(self._layers[:count], self._rope_of, kv_caches, strict=False):
            normed, residual = layer.attention_input(x, residual)
            del x  # in the sum now: its memory is free for what the layer computes
            x, residual = layer.attend(normed, residual, rotations[rope], kv_cache, batch)
            normed, residual = layer.mlp_input(x, residual)
            del x
            x = layer.feed_forward(normed)
        return x, residual, rotations

    def _final_norm(self, x: Tensor, residual: Tensor | None) -> Tensor:
        assert residual is not None, "a decoder has at least one layer"
        return self._norm.add(x, residual)[0]

    def reserve(self, seq_len: int) -> int:
        return min(rope.reserve(seq_len) for rope in self._ropes)

    @torch.inference_mode()
    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self._head(hidden)


def _head(config: ModelConfig, loader: Loader, embedding: Embedding) -> Head | LabelHead:
    if config.num_labels:
        return LabelHead(loader.tensor("score.weight", (config.num_labels, config.hidden_size)))
    if config.tie_word_embeddings:
        head = loader.tied_head(HEAD, embedding)
    else:
        head = loader.linear({HEAD: config.vocab_size}, config.hidden_size, bias=False, is_sensitive=True)
    return Head(head, loader.kernels, config.logit_soft_cap)


def _ropes(config: ModelConfig, num_positions: int, loader: Loader) -> list[RotaryEmbedding]:
    """The rotary embedding, and a second one where layers with a window have their own."""
    configs = [config.rope] if config.local_rope is None else [config.rope, config.local_rope]
    length = config.max_position_embeddings
    return [
        RotaryEmbedding(rope, length, num_positions, loader.dtype, loader.device, loader.kernels) for rope in configs
    ]
