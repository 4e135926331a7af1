"""Sampler: from logits to each row's next token."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..messages import TokenLogprobs
from .batch import Batch
from .draw import DrawOptions, draw
from .logit_edits import edit_logits, needs_edits
from .logprobs import token_logprobs
from .randomness import uniform
from .row_ops import argmax
from .sampling_rows import NO_LOGPROBS


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnTokens:
    """``tokens`` int64 [R]; ``is_valid`` [R] is False where a row had nothing to draw; ``logprobs`` by place in R."""

    tokens: NDArray[np.int64]
    is_valid: NDArray[np.bool_]
    logprobs: dict[int, TokenLogprobs]


class Sampler:
    """Draws for rows of one batch; ids from ``vocab_size`` up are padding of the head and are never drawn or listed."""

    def __init__(self, batch: Batch, vocab_size: int) -> None:
        self._batch = batch
        self._vocab_size = vocab_size

    def sample(self, logits: Tensor, rows: NDArray[np.int64]) -> DrawnTokens:
        """One token per row of logits [R, head rows] float32, which may be changed in place."""
        logits = logits[:, : self._vocab_size]
        num_logprobs = self._batch.sampling.num_logprobs[rows]
        reporting = np.flatnonzero(num_logprobs != NO_LOGPROBS)
        raw = logits[torch.from_numpy(reporting).to(logits.device)] if len(reporting) else logits
        if needs_edits(self._batch, rows):
            edit_logits(logits, self._batch, rows)
        drawn = self._draw(logits, rows)
        tokens = drawn.clamp(min=0)
        is_valid = (drawn >= 0) & logits.gather(1, tokens[:, None])[:, 0].isfinite()
        logprobs: dict[int, TokenLogprobs] = {}
        if len(reporting):
            chosen = tokens[torch.from_numpy(reporting).to(logits.device)]
            entries = token_logprobs(raw, chosen, num_logprobs[reporting].tolist())
            logprobs = dict(zip(reporting.tolist(), entries, strict=True))
        return DrawnTokens(tokens=tokens.cpu().numpy(), is_valid=is_valid.cpu().numpy(), logprobs=logprobs)

    def _draw(self, logits: Tensor, rows: NDArray[np.int64]) -> Tensor:
        is_greedy = self._batch.sampling.is_greedy[rows]
        if is_greedy.all():
            return argmax(logits)
        if not is_greedy.any():
            return draw(logits, self._options(rows))
        tokens = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
        greedy = torch.from_numpy(np.flatnonzero(is_greedy)).to(logits.device)
        random = torch.from_numpy(np.flatnonzero(~is_greedy)).to(logits.device)
        tokens[greedy] = argmax(logits[greedy])
        tokens[random] = draw(logits[random], self._options(rows[~is_greedy]))
        return tokens

    def _options(self, rows: NDArray[np.int64]) -> DrawOptions:
        sampling = self._batch.sampling
        step = (self._batch.num_tokens[rows] - sampling.num_prompt_tokens[rows]).astype(np.uint64)
        return DrawOptions(
            temperature=sampling.temperature[rows],
            top_k=sampling.top_k[rows],
            top_p=sampling.top_p[rows],
            min_p=sampling.min_p[rows],
            uniform=uniform(sampling.seed[rows], sampling.sample_index[rows], step),
        )
