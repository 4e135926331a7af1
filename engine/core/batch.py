"""Batch: the persistent rows from which each step's inputs are gathered.

A running sample keeps one row from its start to its end (preemption ends it). Everything that a step needs per token or
per row lies in arrays indexed by that row, so inputs are gathered with array arithmetic, not by walking over tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...kernels.attention_batch import AttentionBatch
from ..layers.output_rows import OutputRows
from .request import Sample
from .sampling_rows import SamplingRows
from .step_plan import StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """One step's inputs: ``input_ids`` and ``positions`` int64 [T] on the device, and where keys and values lie.

    ``outputs`` are the tokens whose hidden states are read, or None: all of them. ``rows`` [B] are the batch rows in
    plan order, ``starts`` [B] the first of each one's ``num_outputs`` [B] hidden states, ``computed`` and ``counts``
    [B] the tokens computed before and in this step. ``drawing`` [R] selects the requests whose next token is drawn.
    """

    input_ids: Tensor
    positions: Tensor
    attention: AttentionBatch
    outputs: OutputRows | None
    rows: NDArray[np.int64]
    starts: NDArray[np.int64]
    num_outputs: NDArray[np.int64]
    computed: NDArray[np.int64]
    counts: NDArray[np.int64]
    drawing: NDArray[np.int64]


class Batch:
    """``num_rows`` rows of tokens, block tables and sampling options."""

    def __init__(self, *, num_rows: int, max_model_len: int, block_size: int) -> None:
        self._block_size = block_size
        self._token_ids = np.zeros((num_rows, max_model_len), dtype=np.int32)
        self._block_table = np.zeros((num_rows, -(-max_model_len // block_size)), dtype=np.int32)
        self._num_tokens = np.zeros(num_rows, dtype=np.int64)
        self._free_rows = list(reversed(range(num_rows)))
        self.sampling = SamplingRows(num_rows)

    @property
    def has_free_row(self) -> bool:
        return bool(self._free_rows)

    @property
    def num_tokens(self) -> NDArray[np.int64]:
        """Known tokens per row."""
        return self._num_tokens

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """Known tokens [rows, max_model_len]; what lies past a row's ``num_tokens`` is stale."""
        return self._token_ids

    @property
    def block_table(self) -> NDArray[np.int32]:
        """Blocks per row [rows, columns]; what lies past a row's context is stale."""
        return self._block_table

    def add(self, sample: Sample) -> None:
        """Give a sample a row and fill it."""
        row = self._free_rows.pop()
        sample.row = row
        self._token_ids[row, : sample.num_tokens] = sample.tokens
        self._num_tokens[row] = sample.num_tokens
        self._block_table[row, : len(sample.blocks)] = sample.blocks
        self.sampling.set(row, sample)

    def remove(self, sample: Sample) -> None:
        """Take a sample's row back."""
        self.sampling.clear(sample.row)
        self._free_rows.append(sample.row)
        sample.row = -1

    def set_block(self, row: int, index: int, block: int) -> None:
        """Put a block into a row's table."""
        self._block_table[row, index] = block

    def append_tokens(self, rows: NDArray[np.int64], tokens: NDArray[np.int64]) -> None:
        """Add one drawn token to each row."""
        self._token_ids[rows, self._num_tokens[rows]] = tokens
        self._num_tokens[rows] += 1
        if self.sampling.edits:
            for row, token in zip(rows.tolist(), tokens.tolist(), strict=True):
                if row in self.sampling.edits:
                    self.sampling.edits[row].append(token)

    def inputs(self, plan: StepPlan, device: torch.device) -> StepInputs:
        """Gather the inputs of a step."""
        size = self._block_size
        rows = np.array([sample.row for sample in plan.samples], dtype=np.int64)
        computed = np.array([sample.num_computed_tokens for sample in plan.samples], dtype=np.int64)
        draws = np.array([sample.pooler is None for sample in plan.samples], dtype=np.bool_)
        counts = np.fromiter(plan.num_tokens.values(), dtype=np.int64, count=len(rows))
        ends = np.cumsum(counts)
        starts = ends - counts
        seq_lens = computed + counts
        token_rows = np.repeat(rows, counts)
        positions = np.arange(ends[-1]) + np.repeat(computed - starts, counts)
        blocks = self._block_table[token_rows, positions // size].astype(np.int64)
        num_columns = -(-int(seq_lens.max()) // size)
        query_start_loc = np.zeros(len(rows) + 1, dtype=np.int32)
        query_start_loc[1:] = ends

        def upload(array: NDArray[np.generic]) -> Tensor:
            return torch.from_numpy(array).to(device, non_blocking=True)

        attention = AttentionBatch(
            query_start_loc=upload(query_start_loc),
            seq_lens=upload(seq_lens.astype(np.int32)),
            block_table=upload(self._block_table[rows, :num_columns]),
            slot_mapping=upload(blocks * size + positions % size),
            query_lens_host=tuple(counts.tolist()),
            seq_lens_host=tuple(seq_lens.tolist()),
        )
        ranges = [sample.output_rows(count) for sample, count in zip(plan.samples, counts.tolist(), strict=True)]
        first, num_outputs = np.array(ranges, dtype=np.int64).T
        return StepInputs(
            input_ids=upload(self._token_ids[token_rows, positions].astype(np.int64)),
            positions=upload(positions),
            attention=attention,
            outputs=_select_outputs(attention, starts, first, num_outputs),
            rows=rows,
            starts=np.cumsum(num_outputs) - num_outputs,
            num_outputs=num_outputs,
            computed=computed,
            counts=counts,
            drawing=np.flatnonzero((seq_lens == self._num_tokens[rows]) & draws),
        )


def _select_outputs(
    attention: AttentionBatch, starts: NDArray[np.int64], first: NDArray[np.int64], counts: NDArray[np.int64]
) -> OutputRows | None:
    """Of request b, whose queries begin at ``starts[b]``, ``counts[b]`` rows from its ``first[b]`` on.

    None where those are all rows.
    """
    query_lens, seq_lens = np.array(attention.query_lens_host), np.array(attention.seq_lens_host)
    if (counts == query_lens).all():
        return None
    chosen = np.flatnonzero(counts)
    counts, first = counts[chosen], first[chosen]
    ends = np.cumsum(counts)
    index = np.arange(counts.sum()) + np.repeat(starts[chosen] + first - ends + counts, counts)
    # A row sees what lies up to itself, so a context that ends with the last chosen row is the same to all of them.
    seq_lens = seq_lens[chosen] - query_lens[chosen] + first + counts
    device = attention.block_table.device

    def upload(array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    rows = upload(index)
    batch = AttentionBatch(
        query_start_loc=upload(np.concatenate(([0], ends)).astype(np.int32)),
        seq_lens=upload(seq_lens.astype(np.int32)),
        block_table=attention.block_table
        if len(chosen) == attention.num_requests
        else attention.block_table[upload(chosen)],
        slot_mapping=attention.slot_mapping[rows],
        query_lens_host=tuple(counts.tolist()),
        seq_lens_host=tuple(seq_lens.tolist()),
    )
    return OutputRows(rows, batch)
