"""Sampling: edits of logits, the most probable token, and the draw under temperature, top_k, top_p and min_p.

**The draw.** With m a row's maximum and 1/t rounded to float32, a token of logit l weighs
``floor(2^40 exp((l - m) * (1/t)))``, an integer, so that sums are exact in any order: a row's token depends neither on
its neighbours nor on how a kernel cuts the row, and devices differ only where their ``exp`` does. What is kept:

    top_k   every l that is at least the k-th largest one; its equals stay
    top_p   of those, with total weight S: every l above which less than max(1, ceil(top_p S)) weighs; equals stay
    min_p   every l with exp((l - m) * (1/t)) >= min_p

The token is the first one, in the order of the vocabulary, up to which the kept tokens weigh more than
``floor(uniform * total)``.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..sampling_options import NOT_SEEN, DrawOptions, LogitEdits

WEIGHT_ONE = float(1 << 40)  # the weight of the most probable token
_MAX_RANKED = 1024  # up to here a row's best are picked, beyond it sorted


def argmax(logits: Tensor) -> Tensor:
    """The first column of each row's maximum, logits [R, V] -> int64 [R]; -1 where that is not finite (NaN counts)."""
    tokens = logits.argmax(dim=1)
    return torch.where(logits.gather(1, tokens[:, None])[:, 0].isfinite(), tokens, -1)


def draw_tokens(logits: Tensor, options: DrawOptions) -> Tensor:
    """One token per row of logits [R, V] float32, int64 [R]; -1 where a row's maximum is not finite.

    Costs a sort of the rows where top_p or a large top_k asks for one; the kernels need none.
    """
    maximum = logits.amax(dim=1, keepdim=True)
    temperature = _on(logits, options.temperature)[:, None]
    is_greedy = temperature == 0
    inverse = torch.where(is_greedy, 1.0, temperature).reciprocal()
    weights = ((logits - maximum) * inverse).exp_()
    quanta = _quanta(weights)
    if options.has_filters(logits.shape[1]):
        kept = weights >= _on(logits, options.min_p)[:, None]
        kept &= logits >= _cut(logits, maximum, inverse, quanta, options)
        quanta.masked_fill_(~kept, 0)
    cumulated = quanta.cumsum(dim=1)
    total = cumulated[:, -1]
    target = torch.minimum((_on(logits, options.uniform) * total.double()).long(), total - 1)
    tokens = torch.searchsorted(cumulated, target[:, None], right=True)[:, 0].clamp_(max=logits.shape[1] - 1)
    tokens = torch.where(is_greedy[:, 0], logits.argmax(dim=1), tokens)
    return torch.where(maximum[:, 0].isfinite(), tokens, -1)


def edit_logits(logits: Tensor, edits: LogitEdits) -> None:
    """Bias, then penalties, in place on logits [R, V] float32.

    Repetition over prompt and output (Keskar et al., 2019): positive logits are divided, others multiplied. Presence
    and frequency over the output (OpenAI): subtracted once, and times the count.
    """
    rows, tokens = _on(logits, edits.rows), _on(logits, edits.tokens)
    counts = _on(logits, edits.counts)
    repetition = _on(logits, edits.repetition_penalty)[rows]
    repetition = torch.where(counts > NOT_SEEN, repetition, 1.0)
    values = logits[rows, tokens] + _on(logits, edits.bias)
    values = torch.where(values > 0, values / repetition, values * repetition)
    counts = counts.clamp(min=0)
    presence = _on(logits, edits.presence_penalty)[rows]
    values = values - torch.where(counts > 0, presence, 0.0)
    logits[rows, tokens] = values - _on(logits, edits.frequency_penalty)[rows] * counts


def _quanta(weights: Tensor) -> Tensor:
    return (weights * WEIGHT_ONE).long()


def _cut(logits: Tensor, maximum: Tensor, inverse: Tensor, quanta: Tensor, options: DrawOptions) -> Tensor:
    """The smallest logit [R, 1] that top_k and top_p leave."""
    limits = options.limits(logits.shape[1])
    width = int(limits.max()) if limits.all() and limits.max() <= _MAX_RANKED else logits.shape[1]
    best = logits.topk(width, dim=1).values
    top_k = _on(logits, np.where(limits > 0, limits, width))[:, None]
    cut = best.gather(1, top_k - 1)
    ranked = _quanta(((best - maximum) * inverse).exp_()).masked_fill_(best < cut, 0).cumsum(dim=1)
    total = quanta.masked_fill(logits < cut, 0).sum(dim=1, keepdim=True)
    top_p = _on(logits, options.top_p)[:, None].double()
    needed = torch.minimum((top_p * total.double()).ceil().long().clamp_(min=1), total)
    place = torch.minimum(torch.searchsorted(ranked, needed), top_k - 1)
    return torch.where(top_p < 1.0, best.gather(1, place), cut)


def _on(tensor: Tensor, array: NDArray[np.generic]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(tensor.device, non_blocking=True)
