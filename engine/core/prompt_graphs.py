"""PromptGraphs: steps with tokens of prompts, recorded once for all sizes and replayed.

Recorded is what happens to every token: all layers but the last, which writes its keys and values and gives queries.
From there only rows go on whose hidden states are read, kernel by kernel, since their number follows from who draws.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...kernels.attention_batch import RecordedPrompt
from ...kernels.kv_layout import KVCache
from ...log import get_logger
from ...platforms.graphs import GraphRecorder, SizedGraph, UnrecordableError
from .batch import StepInputs
from .graph_reach import longer_reach

if TYPE_CHECKING:
    from ..models.model import Model

logger = get_logger(__name__)

# Fewer tokens take kernels for few rows: other calls.
_LEAST_TOKENS = 65


class PromptGraphs:
    """The graphs of one model for steps of up to ``num_tokens`` tokens of ``num_rows`` requests.

    ``num_columns``: blocks of the longest sequence. ``refused``: why steps run without, or None.
    """

    def __init__(
        self,
        model: Model,
        caches: list[KVCache],
        recorder: GraphRecorder,
        num_tokens: int,
        num_rows: int,
        num_columns: int,
    ) -> None:
        self._model = model
        self._caches = caches
        self._recorder = recorder
        self._largest = num_tokens, num_rows
        self._max_len = num_columns * caches[0].block_size
        self._inputs = _Inputs(num_tokens, num_rows, num_columns)
        self._graph: SizedGraph | None = None
        self._reach = 0
        self.num_replays = 0
        self.refused = "steps are small" if num_tokens <= _LEAST_TOKENS else None

    def can_run(self, inputs: StepInputs) -> bool:
        """Whether a step is recorded; the first one records them all."""
        if self.refused is not None or inputs.outputs is None or len(inputs.input_ids) < _LEAST_TOKENS:
            return False
        return self.prepare(inputs.attention.max_seq_len)

    def prepare(self, seq_len: int) -> bool:
        """Have steps of sequences of up to ``seq_len`` tokens recorded, where that can be."""
        if self.refused is None and seq_len > self._reach:
            reach = longer_reach(self._model, seq_len, self._reach, self._max_len)
            if reach is None:
                return False
            self._reach = reach
            self._record()
        return self._graph is not None

    def run(self, inputs: StepInputs) -> Tensor:
        """``Model.forward`` of a step for which ``can_run`` has said yes."""
        assert self._graph is not None and inputs.outputs is not None
        self._inputs.fill(inputs)
        queries, residual = self._graph.replay(len(inputs.input_ids), inputs.attention.num_requests)
        self.num_replays += 1
        return self._model.finish(queries, residual, self._caches, inputs.outputs)

    def give_back_pages(self) -> None:
        """The memory of the last replay."""
        self._recorder.give_back_pages()

    @torch.inference_mode()
    def _record(self) -> None:
        def step(num_tokens: int, num_requests: int) -> tuple[Tensor, Tensor]:
            batch = RecordedPrompt(
                query_start_loc=inputs.query_start_loc[: num_requests + 1],
                seq_lens=inputs.seq_lens[:num_requests],
                block_table=inputs.block_table[:num_requests],
                slot_mapping=inputs.slots[:num_tokens],
                longest=self._reach,
                num_recorded=num_requests,
            )
            return self._model.begin(inputs.input_ids[:num_tokens], inputs.positions[:num_tokens], self._caches, batch)

        inputs = self._inputs
        self._graph = None
        try:
            self._graph = self._recorder.record_sized(step, (_LEAST_TOKENS, 1), self._largest)
        except UnrecordableError as error:
            self.refused = str(error)
        if self._graph is None:
            self.refused = self.refused or "its graphs have one size each"
            logger.info("steps with prompts are not recorded: %s", self.refused)
            return
        logger.info("recorded steps of %d tokens and more for sequences of up to %d", _LEAST_TOKENS, self._reach)


class _Inputs:
    """What recorded steps read, in tensors that stay where they are; the types are those of ``AttentionBatch``."""

    def __init__(self, num_tokens: int, num_rows: int, num_columns: int) -> None:
        self.input_ids, self.positions, self.slots = (torch.empty(num_tokens, dtype=torch.int64) for _ in range(3))
        self.query_start_loc = torch.empty(num_rows + 1, dtype=torch.int32)
        self.seq_lens = torch.empty(num_rows, dtype=torch.int32)
        self.block_table = torch.empty((num_rows, num_columns), dtype=torch.int32)

    def fill(self, inputs: StepInputs) -> None:
        """Take over a step's inputs."""
        batch = inputs.attention
        for there, here in (
            (self.input_ids, inputs.input_ids),
            (self.positions, inputs.positions),
            (self.slots, batch.slot_mapping),
            (self.query_start_loc, batch.query_start_loc),
            (self.seq_lens, batch.seq_lens),
        ):
            there[: len(here)] = here
        rows, columns = batch.block_table.shape
        self.block_table[:rows, :columns] = batch.block_table
