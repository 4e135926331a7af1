"""SamplingRows: every row's sampling options as arrays, so that a step reads them for all its rows at once."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .request import Sample

NO_LOGPROBS = -1
BANNED = -100.0
TokenValues = tuple[NDArray[np.int64], NDArray[np.float32]]


class SamplingRows:
    """Options per row of the batch; a free row's are those of a greedy request without extras.

    ``bias`` and ``suppressed`` hold token lists for the few rows that have them: additions to logits, and the ids that
    may not be drawn while fewer than ``min_tokens`` tokens have been generated.
    """

    def __init__(self, num_rows: int) -> None:
        self.is_greedy = np.ones(num_rows, dtype=bool)
        self.temperature = np.ones(num_rows, dtype=np.float32)
        self.top_k = np.zeros(num_rows, dtype=np.int64)
        self.top_p = np.ones(num_rows, dtype=np.float32)
        self.min_p = np.zeros(num_rows, dtype=np.float32)
        self.has_penalties = np.zeros(num_rows, dtype=bool)
        self.repetition_penalty = np.ones(num_rows, dtype=np.float32)
        self.presence_penalty = np.zeros(num_rows, dtype=np.float32)
        self.frequency_penalty = np.zeros(num_rows, dtype=np.float32)
        self.seed = np.zeros(num_rows, dtype=np.uint64)
        self.sample_index = np.zeros(num_rows, dtype=np.uint64)
        self.num_prompt_tokens = np.zeros(num_rows, dtype=np.int64)
        self.min_tokens = np.zeros(num_rows, dtype=np.int64)
        self.num_logprobs = np.full(num_rows, NO_LOGPROBS, dtype=np.int64)
        self.bias: dict[int, TokenValues] = {}
        self.suppressed: dict[int, NDArray[np.int64]] = {}

    def set(self, row: int, sample: Sample) -> None:
        """Write a sample's options into its row."""
        params = sample.params
        self.is_greedy[row] = params.is_greedy
        self.temperature[row] = params.temperature
        self.top_k[row] = max(params.top_k, 0) if params.top_k < 1 << 31 else 0
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.has_penalties[row] = params.has_penalties
        self.repetition_penalty[row] = params.repetition_penalty
        self.presence_penalty[row] = params.presence_penalty
        self.frequency_penalty[row] = params.frequency_penalty
        self.seed[row] = params.seed or 0
        self.sample_index[row] = sample.index
        self.num_prompt_tokens[row] = sample.num_prompt_tokens
        self.min_tokens[row] = params.min_tokens
        self.num_logprobs[row] = NO_LOGPROBS if params.logprobs is None else params.logprobs
        if params.logit_bias:
            self.bias[row] = _bias(params.logit_bias)
        if params.min_tokens and sample.stop_ids:
            self.suppressed[row] = np.array(sorted(sample.stop_ids), dtype=np.int64)

    def clear(self, row: int) -> None:
        """Drop what a finished sample left that costs time in later steps."""
        self.is_greedy[row] = True
        self.has_penalties[row] = False
        self.num_logprobs[row] = NO_LOGPROBS
        self.bias.pop(row, None)
        self.suppressed.pop(row, None)


def _bias(logit_bias: dict[int, float]) -> TokenValues:
    ids = np.array(list(logit_bias), dtype=np.int64)
    values = np.array(list(logit_bias.values()), dtype=np.float32)
    values[values <= BANNED] = -np.inf
    return ids, values
