"""Draws in each way, and edits of a few logits."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .. import reference
from ..problems import SamplingProblem
from ..sampling_options import DrawOptions, LogitEdits
from .case import Answer, Case, Source

NUM_ROWS = 5


def cases(source: Source) -> list[Case]:
    """One row for each way to draw."""
    logits = 3 * source.normal(NUM_ROWS, source.sizes.vocab_size)
    options = DrawOptions(
        temperature=np.array([0.0, 0.8, 1.0, 1.0, 1.3], dtype=np.float32),
        top_k=np.array([0, 0, 40, 0, 20], dtype=np.int64),
        top_p=np.array([1.0, 1.0, 1.0, 0.9, 0.7], dtype=np.float32),
        min_p=np.array([0.0, 0.0, 0.0, 0.05, 0.0], dtype=np.float32),
        uniform=np.array([0.0, 0.3, 0.6, 0.9, 0.1]),
    )
    edits = LogitEdits(
        rows=np.arange(NUM_ROWS),
        tokens=np.arange(NUM_ROWS) * 7 % source.sizes.vocab_size,
        counts=np.array([-1, 0, 1, 2, 3], dtype=np.int32),
        bias=np.full(NUM_ROWS, 0.5, dtype=np.float32),
        repetition_penalty=np.full(NUM_ROWS, 1.5, dtype=np.float32),
        presence_penalty=np.full(NUM_ROWS, 0.25, dtype=np.float32),
        frequency_penalty=np.full(NUM_ROWS, 0.75, dtype=np.float32),
    )

    def edit(run: Callable[..., None]) -> Answer:
        copy = logits.clone()
        run(copy, edits)
        return copy

    problem = SamplingProblem(vocab_size=source.sizes.vocab_size)
    drawn, best = reference.draw_tokens(logits, options), reference.argmax(logits)
    return [
        Case("argmax", problem, lambda candidate: candidate.run(logits), best),
        Case("draw_tokens", problem, lambda candidate: candidate.run(logits, options), drawn),
        Case("edit_logits", problem, lambda candidate: edit(candidate.run), edit(reference.edit_logits)),
    ]
