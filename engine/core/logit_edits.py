"""What changes a row's logits before a token is drawn: bias, penalties, ids suppressed until min_tokens.

All functions change float32 logits [R, V] in place; ``rows`` int64 [R] are the batch rows behind them. Rows without an
option are not touched at all.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .batch import Batch


def needs_edits(batch: Batch, rows: NDArray[np.int64]) -> bool:
    """True where any row's logits must be changed."""
    sampling = batch.sampling
    return bool(sampling.bias or sampling.suppressed or sampling.has_penalties[rows].any())


def edit_logits(logits: Tensor, batch: Batch, rows: NDArray[np.int64]) -> None:
    """Apply logit_bias, then penalties, then the suppression of stop ids."""
    sampling = batch.sampling
    if sampling.bias:
        _add_bias(logits, batch, rows)
    penalized = np.flatnonzero(sampling.has_penalties[rows])
    if len(penalized):
        _penalize(logits, batch, penalized, rows[penalized])
    if sampling.suppressed:
        _suppress(logits, batch, rows)


def _add_bias(logits: Tensor, batch: Batch, rows: NDArray[np.int64]) -> None:
    found = [(place, batch.sampling.bias[row]) for place, row in enumerate(rows.tolist()) if row in batch.sampling.bias]
    if not found:
        return
    places = np.repeat([place for place, _ in found], [len(ids) for _, (ids, _) in found])
    columns = np.concatenate([ids for _, (ids, _) in found])
    values = np.concatenate([values for _, (_, values) in found])
    logits[_on(logits, places), _on(logits, columns)] += _on(logits, values)


def _suppress(logits: Tensor, batch: Batch, rows: NDArray[np.int64]) -> None:
    sampling = batch.sampling
    early = batch.num_tokens[rows] - sampling.num_prompt_tokens[rows] < sampling.min_tokens[rows]
    found = [(place, sampling.suppressed[row]) for place, row in enumerate(rows.tolist()) if early[place]]
    found = [(place, ids) for place, ids in found if len(ids)]
    if found:
        places = np.repeat([place for place, _ in found], [len(ids) for _, ids in found])
        logits[_on(logits, places), _on(logits, np.concatenate([ids for _, ids in found]))] = -torch.inf


def _penalize(logits: Tensor, batch: Batch, places: NDArray[np.int64], rows: NDArray[np.int64]) -> None:
    """Repetition over prompt and output (Keskar et al., 2019), presence and frequency over the output (OpenAI).

    ``places`` are those rows of the logits that lie behind the batch's ``rows``.
    """
    sampling = batch.sampling
    num_tokens = batch.num_tokens[rows]
    num_prompt = sampling.num_prompt_tokens[rows]
    where = _on(logits, places)[:, None]

    tokens, _ = _padded(logits, batch, rows, np.zeros_like(num_prompt), num_tokens)
    penalty = _on(logits, sampling.repetition_penalty[rows])[:, None]
    seen = logits[where, tokens]
    logits[where, tokens] = torch.where(seen > 0, seen / penalty, seen * penalty)

    tokens, valid = _padded(logits, batch, rows, num_prompt, num_tokens)
    if tokens.shape[1] == 0:
        return
    presence = _on(logits, sampling.presence_penalty[rows])[:, None] * valid[:, :1]
    logits[where, tokens] = logits[where, tokens] - presence
    frequency = -_on(logits, sampling.frequency_penalty[rows])[:, None] * valid
    logits.index_put_((where.expand_as(tokens), tokens), frequency, accumulate=True)


def _padded(
    logits: Tensor, batch: Batch, rows: NDArray[np.int64], start: NDArray[np.int64], end: NDArray[np.int64]
) -> tuple[Tensor, Tensor]:
    """Tokens ``start .. end`` of each row as one matrix, and 1.0 where an entry is real.

    Short rows repeat their first token, which the operations above may meet any number of times; the entries of
    an empty row are all unreal.
    """
    lengths = end - start
    offsets = np.arange(int(lengths.max()))
    valid = offsets < lengths[:, None]
    tokens = batch.token_ids[rows[:, None], start[:, None] + np.where(valid, offsets, 0)]
    return _on(logits, tokens.astype(np.int64)), _on(logits, valid.astype(np.float32))


def _on(logits: Tensor, array: NDArray[np.generic]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(logits.device)
