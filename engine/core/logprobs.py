"""Log-probabilities of tokens under the raw model distribution."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..messages import TokenLogprobs
from .row_ops import count_above, top_values

FLOOR = -9999.0  # what OpenAI reports for impossible tokens; JSON has no infinity


def token_logprobs(logits: Tensor, tokens: Tensor, num_top: Sequence[int]) -> list[TokenLogprobs]:
    """The chosen token's entry for each row of raw logits [R, V] float32, with the ``num_top`` best of that row."""
    normalizer = logits.logsumexp(dim=1, keepdim=True)
    chosen_logits = logits.gather(1, tokens[:, None])
    chosen = (chosen_logits - normalizer).clamp_(min=FLOOR)[:, 0].tolist()
    ranks = (count_above(logits, chosen_logits[:, 0]) + 1).tolist()
    width = min(max(num_top), logits.shape[1])
    best, columns = top_values(logits, width) if width else (logits[:, :0], tokens[:, None][:, :0])
    best_rows = (best - normalizer).clamp_(min=FLOOR).tolist()
    column_rows = columns.tolist()
    return [
        TokenLogprobs(
            token_id=token,
            logprob=chosen[row],
            rank=ranks[row],
            top=list(zip(column_rows[row][:count], best_rows[row][:count], strict=True)),
        )
        for row, (token, count) in enumerate(zip(tokens.tolist(), num_top, strict=True))
    ]
