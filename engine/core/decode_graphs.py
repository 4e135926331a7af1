"""DecodeGraphs: steps in which every request computes one token, recorded once per number of rows and replayed.

A step is recorded over tensors that stay: ids, positions, slots and block tables of up to all rows of the batch. A step
of fewer rows than its graph has is padded with requests of length 0, which read nothing and write to no slot.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...kernels.attention_batch import RecordedBatch
from ...kernels.kv_layout import KVCache
from ...log import get_logger
from ...platforms.graphs import Graph, GraphRecorder, UnrecordableError
from .batch import Batch
from .decode_inputs import DecodeInputs
from .graph_reach import longer_reach

if TYPE_CHECKING:
    from ..models.model import Model

logger = get_logger(__name__)


@dataclass(slots=True)
class GraphStats:
    """``num_graphs`` recorded so far, the bytes of all of them, how many steps they have replayed.

    ``refused``: why steps run without, or None.
    """

    num_graphs: int = 0
    num_bytes: int = 0
    num_replays: int = 0
    refused: str | None = None


@dataclass(frozen=True, slots=True)
class DecodeOutputs:
    """``logits`` float32 [B, head rows], and ``tokens`` int64 [B], the largest of each row; until the next replay."""

    logits: Tensor
    tokens: Tensor


class DecodeGraphs:
    """The graphs of one model over one batch of up to ``num_rows`` rows and ``num_columns`` blocks each.

    ``argmax``: logits [B, head rows] -> tokens int64 [B].
    """

    def __init__(
        self,
        model: Model,
        caches: list[KVCache],
        recorder: GraphRecorder,
        argmax: Callable[[Tensor], Tensor],
        device: torch.device,
        num_rows: int,
        num_columns: int,
    ) -> None:
        self._model = model
        self._caches = caches
        self._recorder = recorder
        self._argmax = argmax
        self._inputs = DecodeInputs(recorder.rows_for(num_rows), num_columns, caches[0].block_size, device)
        self._max_len = num_columns * caches[0].block_size
        self._graphs: dict[int, Graph] = {}
        self._reach = 0
        self.stats = GraphStats()

    def can_run(self, batch: Batch, rows: NDArray[np.int64]) -> bool:
        """Whether a step of the batch's ``rows`` is recorded; one of a size that comes for the first time is now."""
        if self.stats.refused is not None:
            return False
        longest = int(batch.num_tokens[rows].max())
        if longest > self._reach and not self._extend(longest):
            return False
        size = self._recorder.rows_for(len(rows))
        return size in self._graphs or self._record(size)

    def run(self, batch: Batch, rows: NDArray[np.int64]) -> DecodeOutputs:
        """The last token of each of the batch's ``rows`` through the model, where ``can_run`` has said yes."""
        count, size = len(rows), self._recorder.rows_for(len(rows))
        graph = self._graphs[size]
        self._inputs.fill(batch, rows, size)
        graph.replay()
        self.stats.num_replays += 1
        logits, tokens = graph.outputs
        return DecodeOutputs(logits, tokens) if count == size else DecodeOutputs(logits[:count], tokens[:count])

    def _extend(self, seq_len: int) -> bool:
        """Make sequences of that length fit the graphs; those recorded for shorter ones go."""
        reach = longer_reach(self._model, seq_len, self._reach, self._max_len)
        if reach is None:
            return False
        self._graphs.clear()
        self._reach = reach
        return True

    @torch.inference_mode()
    def _record(self, size: int) -> bool:
        def step() -> tuple[Tensor, Tensor]:
            hidden = self._model.forward(inputs.input_ids[:size], inputs.positions[:size], self._caches, attention)
            logits = self._model.compute_logits(hidden)
            return logits, self._argmax(logits)

        inputs = self._inputs
        inputs.clear()
        attention = RecordedBatch(
            query_start_loc=inputs.query_start_loc[: size + 1],
            seq_lens=inputs.seq_lens[:size],
            block_table=inputs.block_table[:size],
            slot_mapping=inputs.slots[:size],
            query_lens_host=(1,) * size,
            longest=self._reach,
        )
        try:
            self._graphs[size] = self._recorder.record(step)
        except UnrecordableError as error:
            self.stats.refused = str(error)
            logger.info("decode steps are not recorded and take somewhat longer: %s", error)
            return False
        self.stats.num_graphs, self.stats.num_bytes = len(self._graphs), self._recorder.num_bytes
        logger.info(
            "recorded a decode step of %d rows for sequences of up to %d tokens; %d graphs take %.1f MiB",
            size,
            self._reach,
            len(self._graphs),
            self.stats.num_bytes / (1 << 20),
        )
        return True
