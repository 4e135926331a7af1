"""Grouped-query attention over a paged KV cache."""

from __future__ import annotations

from torch import Tensor

from ...kernels.attention_batch import AttentionBatch
from ...kernels.kernel_set import KernelSet
from ...kernels.kv_layout import KVCache
from ...kernels.problems import AttentionProblem, KVWriteProblem
from ...kernels.quantized_input import QuantizedInput
from .linear import Linear
from .norm import RMSNorm
from .rope import RotaryEmbedding, Rotation


class Attention:
    """``qkv`` [(H+2G)D,K] and ``output`` [K,HD]; scores are q.k times ``scale``.

    ``q_norm`` and ``k_norm`` normalize queries and keys if the model does so: each head with weights [D], or all heads
    of a token together with weights [HD] and [GD].
    """

    def __init__(
        self,
        qkv: Linear,
        output: Linear,
        rope: RotaryEmbedding,
        problem: AttentionProblem,
        kernels: KernelSet,
        scale: float,
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
        sinks: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
    ) -> None:
        self._qkv = qkv
        self.input_format = qkv.input_format
        self._output = output
        self._rope = rope
        self._problem = problem
        self._q_norm = q_norm
        self._k_norm = k_norm
        self._scale = scale
        self._extras = {"sinks": sinks, "alibi_slopes": alibi_slopes} if problem.has_sinks or problem.has_alibi else {}
        self._attend = kernels.select("paged_attention", problem)
        write = KVWriteProblem(dtype=problem.dtype, kv_dtype=problem.kv_dtype)
        self._write_kv = kernels.select("write_kv", write)
        self._rope_write = None if _norms_tokens(q_norm, problem) else kernels.select_fused("rope_write_kv", write)
        self._fused = None if q_norm or k_norm else kernels.select_fused("rope_write_attend", problem)

    def __call__(
        self, x: Tensor | QuantizedInput, rotation: Rotation, kv_cache: KVCache, batch: AttentionBatch
    ) -> Tensor:
        """x [T,K] -> [T,K]; writes the tokens' keys and values into ``kv_cache`` first."""
        if self._fused is None:
            return self.attend(self.queries(x, rotation, kv_cache, batch), kv_cache, batch)
        tables, window = (rotation.cos_sin, rotation.rows), self._problem.sliding_window
        mixed = self._fused(self._qkv(x), *tables, kv_cache, batch, self._scale, window, self._problem.soft_cap)
        return self._output(mixed)

    def queries(
        self, x: Tensor | QuantizedInput, rotation: Rotation, kv_cache: KVCache, batch: AttentionBatch
    ) -> Tensor:
        """x [T,K] -> queries [T,H,D], ready to attend; the tokens' keys and values are in ``kv_cache``."""
        shape = self._problem
        heads, kv_heads = shape.num_heads, shape.num_kv_heads
        merged = self._qkv(x).view(-1, heads + 2 * kv_heads, shape.head_size)
        q, k, v = merged.split((heads, kv_heads, kv_heads), dim=1)
        return self._rotate_and_write(q, k, v, rotation, kv_cache, batch)

    def attend(self, q: Tensor, kv_cache: KVCache, batch: AttentionBatch) -> Tensor:
        """Queries [R,H,D] -> [R,K]; ``batch`` says where each of them stands."""
        shape = self._problem
        mixed = self._attend(q, kv_cache, batch, self._scale, shape.sliding_window, shape.soft_cap, **self._extras)
        return self._output(mixed.reshape(len(q), -1))

    def _rotate_and_write(
        self, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation, kv_cache: KVCache, batch: AttentionBatch
    ) -> Tensor:
        """q [T,H,D] normalized and rotated; k, the same, and v are in the cache."""
        q_norm, k_norm = self._q_norm, self._k_norm
        if self._rope_write is not None:
            norms = (
                () if q_norm is None or k_norm is None else (q_norm.weight, k_norm.weight, q_norm.eps, q_norm.offset)
            )
            table = rotation.cos_sin, rotation.rows, False
            return self._rope_write(q, k, v, *table, kv_cache, batch.slot_mapping, *norms)
        if q_norm is not None and k_norm is not None:
            q, k = _norm_heads(q, q_norm), _norm_heads(k, k_norm)
        q, k = self._rope(q, k, rotation)
        self._write_kv(k, v, kv_cache, batch.slot_mapping)
        return q


def _norms_tokens(norm: RMSNorm | None, problem: AttentionProblem) -> bool:
    """Whether all heads of a token are normalized together, which no fused kernel does."""
    return norm is not None and norm.weight.shape[0] != problem.head_size


def _norm_heads(x: Tensor, norm: RMSNorm) -> Tensor:
    return norm(x.reshape(-1, norm.weight.shape[0])).view(x.shape)
