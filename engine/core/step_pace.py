"""StepPace: how many prompt tokens a step may take along while requests wait for their next token, by measured times.

A step that also computes a long prompt lasts as long as that does, and whoever waits for a token sees it as a gap. So
such a step takes prompt tokens along only until it would last ``stretch`` times as long as without them. Both times
are this machine's, measured as steps are computed: no number is about a model or a processor. The price is small, since
what a step costs apart from its tokens (a pass over the weights) is at most about 1 / ``stretch`` of it.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median_low

from .step_plan import StepPlan

# Times that count: as many of the latest steps of a kind. Their median forgives steps that others disturbed.
_NUM_TIMES = 9
# Fewer prompt tokens than these say little about a token's time.
_MIN_PROMPT_TOKENS = 16
# A step takes as many along in any case, so that prompts get on.
_LEAST = 16


class StepPace:
    """Watches the times of steps; ``stretch`` 1.0 and more, infinity: no bound."""

    def __init__(self, stretch: float) -> None:
        self._stretch = stretch
        self._decode_times: dict[int, deque[float]] = {}  # by the bits of the number of rows
        self._token_times: deque[float] = deque(maxlen=_NUM_TIMES)

    def max_prompt_tokens(self, num_decoding: int) -> int | None:
        """For a step in which ``num_decoding`` samples wait for a token; None: as many as fit it."""
        if num_decoding == 0 or math.isinf(self._stretch) or not self._token_times:
            return None
        alone = self._decode_time(num_decoding)
        return (
            None if alone is None else max(_LEAST, int((self._stretch - 1.0) * alone / median_low(self._token_times)))
        )

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """A step that has been computed to its end, and by the clock."""
        if plan.is_decode:
            times = self._decode_times.setdefault(len(plan.samples).bit_length(), deque(maxlen=_NUM_TIMES))
            times.append(seconds)
            return
        counts = plan.num_tokens.values()
        num_decoding = sum(count == 1 for count in counts)
        num_prompt = sum(counts) - num_decoding
        if num_prompt >= _MIN_PROMPT_TOKENS:
            alone = (self._decode_time(num_decoding) or 0.0) if num_decoding else 0.0
            # At least half of it: a guess about the rest must not make tokens look free.
            self._token_times.append(max(seconds - alone, 0.5 * seconds) / num_prompt)

    def _decode_time(self, num_rows: int) -> float | None:
        """Of a step of so many rows and nothing else, measured or from the nearest smaller ones that were.

        There each row more is taken to cost what a prompt's token does.
        """
        size = num_rows.bit_length()
        known = [bits for bits in self._decode_times if bits <= size]
        if not known:
            return None
        nearest = max(known)
        measured = median_low(self._decode_times[nearest])
        if nearest == size or not self._token_times:
            return measured
        return measured + (num_rows - (1 << nearest) + 1) * median_low(self._token_times)
