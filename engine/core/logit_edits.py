"""What changes a step's logits before tokens are drawn: bias, penalties, ids banned until min_tokens."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ...kernels.sampling_options import LogitEdits
from .batch import Batch


def gather_edits(batch: Batch, rows: NDArray[np.int64]) -> LogitEdits | None:
    """The edits of the batch's ``rows`` [R], None where no row has any; place r stands for the logits' row r."""
    sampling = batch.sampling
    if not sampling.edits:
        return None
    early = batch.num_tokens[rows] - sampling.num_prompt_tokens[rows] < sampling.min_tokens[rows]
    found = [
        (place, sampling.edits[row].entries(ban_stops=bool(early[place])))
        for place, row in enumerate(rows.tolist())
        if row in sampling.edits
    ]
    if not found:
        return None
    tokens, counts, bias = zip(*(entries for _, entries in found), strict=True)
    return LogitEdits(
        rows=np.repeat([place for place, _ in found], [len(part) for part in tokens]),
        tokens=np.concatenate(tokens),
        counts=np.concatenate(counts),
        bias=np.concatenate(bias),
        repetition_penalty=sampling.repetition_penalty[rows],
        presence_penalty=sampling.presence_penalty[rows],
        frequency_penalty=sampling.frequency_penalty[rows],
    )
