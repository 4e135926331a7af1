"""Rotary position embedding (arXiv:2104.09864): tables of cosines and sines, and the kernel that applies them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.attention_batch import AttentionBatch
from ...kernels.kernel_set import KernelSet
from ...kernels.problems import PlainProblem
from ..model_config import RopeConfig
from .rope_frequencies import attention_factor, inverse_frequencies

_FIRST_ROWS = 4096


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """What one step's tokens are rotated by: ``cos_sin`` float32 [P,R] and the row of each token, int64 [T]."""

    cos_sin: Tensor
    rows: Tensor


class RotaryEmbedding:
    """Rotates queries and keys; one table for all layers, as long as the longest sequence so far has needed.

    Dynamic NTK scaling depends on the sequence's length. As in transformers, the tokens of one forward pass are rotated
    by the frequencies of the length that their sequence has after that pass, and cached keys keep the rotation that
    they were written with; unlike there, each request goes by its own length and not by the longest of the batch. Up
    to ``max_position_embeddings`` nothing depends on the length. Beyond it, a prompt that is computed in several chunks
    or that reuses cached blocks of a prompt of another length is rotated by the length at each of these moments.

    LongRoPE has other frequencies beyond the length of the pretraining. Here the longest sequence that is served
    (``num_positions``) decides, for all requests and once, so that a sequence's keys agree however it was computed.
    """

    def __init__(
        self,
        config: RopeConfig,
        max_position_embeddings: int,
        num_positions: int,
        dtype: torch.dtype,
        device: torch.device,
        kernels: KernelSet,
    ) -> None:
        self._config = config
        self._trained_length = max_position_embeddings
        self._factor = attention_factor(config)
        self._device = device
        self._apply = kernels.select("rope", PlainProblem(dtype))
        served_length = num_positions if config.kind == "longrope" else None
        self._frequencies = inverse_frequencies(config, max_position_embeddings, served_length)
        self._table = self._rotate_by(self._frequencies, torch.arange(min(num_positions, _FIRST_ROWS)))
        self._outgrown: list[Tensor] = []

    def rotation(self, positions: Tensor, batch: AttentionBatch) -> Rotation:
        """The rotation of one step's tokens at ``positions`` [T]; made once and used by every layer."""
        if self._config.kind == "dynamic" and batch.max_seq_len > self._trained_length:
            return self._dynamic_rotation(positions, batch)
        self._grow(batch.max_seq_len)
        return Rotation(self._table, positions)

    def reserve(self, seq_len: int) -> int:
        """Grow the table where needed; returns the longest sequence whose rotation is a row of it."""
        if self._config.kind == "dynamic" and seq_len > self._trained_length:
            return self._trained_length
        self._grow(seq_len)
        return min(len(self._table), self._trained_length) if self._config.kind == "dynamic" else len(self._table)

    def __call__(self, q: Tensor, k: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """q [T,H,D] and k [T,G,D], rotated, possibly in place."""
        return self._apply(q, k, rotation.cos_sin, rotation.rows, False)

    def _grow(self, seq_len: int) -> None:
        # A model's config may promise millions of positions; most are never reached.
        if seq_len > len(self._table):
            num_rows = 1 << (seq_len - 1).bit_length()
            self._outgrown.append(self._table)  # recorded steps may still read it
            self._table = self._rotate_by(self._frequencies, torch.arange(num_rows))

    def _rotate_by(self, frequencies: Tensor, positions: Tensor) -> Tensor:
        """cos | sin of position times frequency, float32 [P,R] on the device."""
        angles = torch.outer(positions.float(), frequencies)
        return (torch.cat((angles.cos(), angles.sin()), -1) * self._factor).to(self._device)

    def _dynamic_rotation(self, positions: Tensor, batch: AttentionBatch) -> Rotation:
        tables = [
            self._rotate_by(
                inverse_frequencies(self._config, self._trained_length, seq_len), torch.arange(start, seq_len)
            )
            for start, seq_len in zip(_starts(batch), batch.seq_lens_host, strict=True)
        ]
        return Rotation(torch.cat(tables), torch.arange(positions.shape[0], device=positions.device))


def _starts(batch: AttentionBatch) -> list[int]:
    """Position of each request's first query token."""
    return [seq_len - query_len for query_len, seq_len in zip(batch.query_lens_host, batch.seq_lens_host, strict=True)]
