"""DecodeGraphs: steps in which every request computes one token, recorded once per number of rows and replayed.

A step is recorded over tensors that stay: ids, positions, slots and block tables of up to all rows of the batch. A step
of fewer rows than its graph has is padded with requests of length 0, which read nothing and write to no slot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...kernels.attention_batch import AttentionBatch
from ...kernels.kv_layout import KVCache
from ...log import get_logger
from ...platforms.graphs import Graph, GraphRecorder, UnrecordableError
from .batch import StepInputs

if TYPE_CHECKING:
    from ..models.model import Model

logger = get_logger(__name__)

_NO_SLOT = -1


@dataclass(slots=True)
class GraphStats:
    """``num_graphs`` recorded so far, the bytes of all of them, how many steps they have replayed.

    ``refused``: why steps run without, or None.
    """

    num_graphs: int = 0
    num_bytes: int = 0
    num_replays: int = 0
    refused: str | None = None


class DecodeGraphs:
    """The graphs of one model over one batch of up to ``num_rows`` rows and ``num_columns`` blocks each."""

    def __init__(
        self,
        model: Model,
        caches: list[KVCache],
        recorder: GraphRecorder,
        device: torch.device,
        num_rows: int,
        num_columns: int,
    ) -> None:
        self._model = model
        self._caches = caches
        self._recorder = recorder
        rows = recorder.rows_for(num_rows)
        self._input_ids = torch.zeros(rows, dtype=torch.int64, device=device)
        self._positions = torch.zeros(rows, dtype=torch.int64, device=device)
        self._slots = torch.full((rows,), _NO_SLOT, dtype=torch.int64, device=device)
        self._seq_lens = torch.zeros(rows, dtype=torch.int32, device=device)
        self._block_table = torch.zeros((rows, num_columns), dtype=torch.int32, device=device)
        self._query_start_loc = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self._max_len = num_columns * caches[0].block_size if caches else 0
        self._graphs: dict[int, Graph] = {}
        self._reach = 0
        self.stats = GraphStats()

    def run(self, inputs: StepInputs) -> tuple[Tensor, Tensor] | None:
        """(hidden [B,K], logits [B,V]) of a step of one token per request, until the next call; None: not recorded.

        A step of a size that comes for the first time is recorded for the next one.
        """
        batch = inputs.attention
        if batch.max_query_len != 1 or self.stats.refused is not None:
            return None
        if batch.max_seq_len > self._reach and not self._extend(batch.max_seq_len):
            return None
        size = self._recorder.rows_for(batch.num_requests)
        if size not in self._graphs:
            self._record(size)
        graph = self._graphs.get(size)
        if graph is None:
            return None
        self._fill(inputs, size)
        graph.replay()
        self.stats.num_replays += 1
        hidden, logits = graph.outputs
        return hidden[: batch.num_requests], logits[: batch.num_requests]

    def _extend(self, seq_len: int) -> bool:
        """Make sequences of that length fit the graphs; those recorded for shorter ones go."""
        reach = min(self._model.reserve(min(max(seq_len, 2 * self._reach), self._max_len)), self._max_len)
        if reach < seq_len:
            return False
        self._graphs.clear()
        self._reach = reach
        return True

    def _record(self, size: int) -> None:
        def step() -> tuple[Tensor, Tensor]:
            hidden = self._model.forward(self._input_ids[:size], self._positions[:size], self._caches, batch)
            return hidden, self._model.compute_logits(hidden)

        batch = AttentionBatch(
            query_start_loc=self._query_start_loc[: size + 1],
            seq_lens=self._seq_lens[:size],
            block_table=self._block_table[:size],
            slot_mapping=self._slots[:size],
            query_lens_host=(1,) * size,
            seq_lens_host=(self._reach,) * size,
        )
        try:
            self._graphs[size] = self._recorder.record(step)
        except UnrecordableError as error:
            self.stats.refused = str(error)
            logger.warning("decode steps run without graphs: %s", error)
            return
        self.stats.num_graphs, self.stats.num_bytes = len(self._graphs), self._recorder.num_bytes
        logger.info(
            "recorded a decode step of %d rows for sequences of up to %d tokens; %d graphs take %.1f MiB",
            size,
            self._reach,
            len(self._graphs),
            self.stats.num_bytes / (1 << 20),
        )

    def _fill(self, inputs: StepInputs, size: int) -> None:
        batch = inputs.attention
        count, columns = batch.num_requests, batch.block_table.shape[1]
        self._input_ids[:count].copy_(inputs.input_ids)
        self._positions[:count].copy_(inputs.positions)
        self._slots[:count].copy_(batch.slot_mapping)
        self._seq_lens[:count].copy_(batch.seq_lens)
        self._block_table[:count, :columns].copy_(batch.block_table)
        if count < size:
            self._input_ids[count:size] = 0
            self._positions[count:size] = 0
            self._slots[count:size] = _NO_SLOT
            self._seq_lens[count:size] = 0
