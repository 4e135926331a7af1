"""Sampler: from logits to each row's next token."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...kernels.problems import SamplingProblem
from ...kernels.sampling_options import DrawOptions
from ..grammar.masks import TokenMasks
from ..messages import TokenLogprobs
from .batch import Batch
from .logit_edits import gather_edits
from .logprobs import token_logprobs
from .randomness import uniform
from .sampling_rows import NO_LOGPROBS


class Kernels(Protocol):
    """The part of KernelSet that the sampler uses."""

    def select(self, op: str, problem: Any) -> Any: ...
    def step_memory(self) -> AbstractContextManager[None]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnTokens:
    """``tokens`` int64 [R]; ``is_valid`` [R] is False where a row had nothing to draw; ``logprobs`` by place in R."""

    tokens: NDArray[np.int64]
    is_valid: NDArray[np.bool_]
    logprobs: dict[int, TokenLogprobs]


def select_sampling(kernels: Kernels, vocab_size: int) -> tuple[Any, Any, Any]:
    """The kernels that a sampler uses: argmax, draw_tokens and edit_logits."""
    problem = SamplingProblem(vocab_size=vocab_size)
    argmax, draw_tokens, edit_logits = (kernels.select(op, problem) for op in ("argmax", "draw_tokens", "edit_logits"))
    return argmax, draw_tokens, edit_logits


class Sampler:
    """Draws for rows of one batch; ids from ``vocab_size`` up are padding of the head and are never drawn or listed."""

    def __init__(self, batch: Batch, vocab_size: int, kernels: Kernels) -> None:
        self._batch = batch
        self._vocab_size = vocab_size
        self._argmax, self._draw_tokens, self._edit_logits = select_sampling(kernels, vocab_size)

    def is_greedy(self, rows: NDArray[np.int64]) -> bool:
        """Whether each row takes the largest of its logits as they are, and nobody asks for more."""
        sampling = self._batch.sampling
        if sampling.edits or sampling.temperature[rows].any():
            return False
        return bool((sampling.num_logprobs[rows] == NO_LOGPROBS).all())

    def argmax(self, logits: Tensor) -> Tensor:
        """int64 [R]: the token of each row of logits [R, head rows]; -1 where their maximum is not finite."""
        tokens: Tensor = self._argmax(logits[:, : self._vocab_size])
        return tokens

    def sample(self, logits: Tensor, rows: NDArray[np.int64], masks: TokenMasks | None = None) -> DrawnTokens:
        """One token per row of logits [R, head rows] float32, which may be changed in place; ``masks`` ban tokens."""
        logits = logits[:, : self._vocab_size]
        num_logprobs = self._batch.sampling.num_logprobs[rows]
        reporting = np.flatnonzero(num_logprobs != NO_LOGPROBS)
        raw = logits[torch.from_numpy(reporting).to(logits.device)] if len(reporting) else logits
        edits = gather_edits(self._batch, rows)
        if edits is not None:
            self._edit_logits(logits, edits)
        if masks is not None:
            masks.apply(logits)
        drawn = self._draw(logits, rows)
        logprobs: dict[int, TokenLogprobs] = {}
        if len(reporting):
            chosen = drawn[torch.from_numpy(reporting).to(logits.device)].clamp(min=0)
            entries = token_logprobs(raw, chosen, num_logprobs[reporting].tolist())
            logprobs = dict(zip(reporting.tolist(), entries, strict=True))
        tokens = drawn.cpu().numpy()
        return DrawnTokens(tokens=np.maximum(tokens, 0), is_valid=tokens >= 0, logprobs=logprobs)

    def _draw(self, logits: Tensor, rows: NDArray[np.int64]) -> Tensor:
        if not self._batch.sampling.temperature[rows].any():
            return self._argmax(logits)
        return self._draw_tokens(logits, self._options(rows))

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
