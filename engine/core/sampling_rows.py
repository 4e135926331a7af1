"""SamplingRows: every row's sampling options as arrays, so that a step reads them for all its rows at once."""

from __future__ import annotations

import numpy as np

from .request import Sample
from .row_edits import RowEdits

NO_LOGPROBS = -1


class SamplingRows:
    """Options per row of the batch; a free row's are those of a greedy request without extras.

    ``edits`` holds what changes the logits of the few rows that have a bias, a penalty or ``min_tokens``. A greedy
    row's temperature is 0.
    """

    def __init__(self, num_rows: int) -> None:
        self.temperature = np.zeros(num_rows, dtype=np.float32)
        self.top_k = np.zeros(num_rows, dtype=np.int64)
        self.top_p = np.ones(num_rows, dtype=np.float32)
        self.min_p = np.zeros(num_rows, dtype=np.float32)
        self.repetition_penalty = np.ones(num_rows, dtype=np.float32)
        self.presence_penalty = np.zeros(num_rows, dtype=np.float32)
        self.frequency_penalty = np.zeros(num_rows, dtype=np.float32)
        self.seed = np.zeros(num_rows, dtype=np.uint64)
        self.sample_index = np.zeros(num_rows, dtype=np.uint64)
        self.num_prompt_tokens = np.zeros(num_rows, dtype=np.int64)
        self.min_tokens = np.zeros(num_rows, dtype=np.int64)
        self.num_logprobs = np.full(num_rows, NO_LOGPROBS, dtype=np.int64)
        self.edits: dict[int, RowEdits] = {}

    def set(self, row: int, sample: Sample) -> None:
        """Write a sample's options into its row."""
        params = sample.params
        random = not params.is_greedy
        self.temperature[row] = params.temperature if random else 0.0
        self.top_k[row] = params.top_k if random and 0 < params.top_k < 1 << 31 else 0
        self.top_p[row] = params.top_p if random else 1.0
        self.min_p[row] = params.min_p if random else 0.0
        self.repetition_penalty[row] = params.repetition_penalty
        self.presence_penalty[row] = params.presence_penalty
        self.frequency_penalty[row] = params.frequency_penalty
        self.seed[row] = params.seed or 0
        self.sample_index[row] = sample.index
        self.num_prompt_tokens[row] = sample.num_prompt_tokens
        self.min_tokens[row] = params.min_tokens
        self.num_logprobs[row] = NO_LOGPROBS if params.logprobs is None else params.logprobs
        stop_ids = sample.stop_ids if params.min_tokens else ()
        if params.logit_bias or params.has_penalties or stop_ids:
            start = sample.num_prompt_tokens
            self.edits[row] = RowEdits(params, sample.tokens[:start], sample.tokens[start:], stop_ids)

    def clear(self, row: int) -> None:
        """Drop what a finished sample left that costs time in later steps."""
        self.num_logprobs[row] = NO_LOGPROBS
        self.edits.pop(row, None)
