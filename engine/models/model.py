"""Model: what the engine core asks of a decoder."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ...kernels.attention_batch import AttentionBatch
from ...kernels.kv_layout import KVCache
from ...quant.kv_scales import KVScales
from ..layers.output_rows import OutputRows
from ..model_config import ModelConfig


class Model(Protocol):
    """A decoder ready to compute. ``weight_bytes`` is the size of its parameters.

    ``kv_dtype`` is what its caches hold; in 8 bits, layers in ``kv_scales`` have calibrated scales, others a scale per
    token and head.
    """

    config: ModelConfig
    dtype: torch.dtype
    kv_heads: int
    head_size: int
    num_layers: int
    weight_bytes: int
    kv_dtype: torch.dtype
    kv_scales: dict[int, KVScales]

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_caches: list[KVCache],
        batch: AttentionBatch,
        outputs: OutputRows | None = None,
    ) -> Tensor:
        """Hidden states [T,K] after the final norm, of the tokens ``input_ids`` at ``positions`` (both int64 [T]).

        Writes each token's keys and values into ``kv_caches`` (one per layer) at ``batch.slot_mapping``. With
        ``outputs`` the hidden states of those rows alone, [R,K], at no cost of the others behind their last keys.
        """
        ...

    def begin(
        self, input_ids: Tensor, positions: Tensor, kv_caches: list[KVCache], batch: AttentionBatch
    ) -> tuple[Tensor, Tensor]:
        """What ``forward`` does to every token, up to the last layer's queries [T,H,D] and its residual [T,K]."""
        ...

    def finish(self, queries: Tensor, residual: Tensor, kv_caches: list[KVCache], outputs: OutputRows) -> Tensor:
        """The rest of ``forward``: hidden states of the rows ``outputs`` of what ``begin`` gave, [R,K]."""
        ...

    def reserve(self, seq_len: int) -> int:
        """Prepare for sequences of that length; returns up to which length all steps of one shape do the same work.

        Where less than ``seq_len`` comes back, steps of longer sequences depend on their lengths in another way.
        """
        ...

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """hidden [R,K] -> logits float32 [R,V]."""
        ...
