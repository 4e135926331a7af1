"""A row's edits, token by token, against a count over the whole row."""

from __future__ import annotations

from collections import Counter

import numpy as np
from twofold.engine.core.row_edits import RowEdits
from twofold.engine.sampling_params import SamplingParams


def as_dict(edits: RowEdits, *, ban_stops: bool = False) -> dict[int, tuple[int, float]]:
    tokens, counts, bias = edits.entries(ban_stops=ban_stops)
    assert len(set(tokens.tolist())) == len(tokens)
    return dict(zip(tokens.tolist(), zip(counts.tolist(), bias.tolist(), strict=True), strict=True))


def test_counts_follow_every_drawn_token() -> None:
    params = SamplingParams(presence_penalty=1.0, logit_bias={3: 2.0, 900: -100.0})
    prompt = [5, 5, 3, 8]
    output = np.random.default_rng(0).integers(0, 300, 500).tolist()
    edits = RowEdits(params, prompt, output[:100], (7,))
    for token in output[100:]:
        edits.append(token)
    counts = Counter(output)
    found = as_dict(edits)
    assert set(found) == {*prompt, *output, 3, 900, 7}
    for token, (count, bias) in found.items():
        seen = token in counts or token in prompt
        assert count == (counts[token] if seen else -1)
        assert bias == {3: 2.0, 900: -np.inf}.get(token, 0.0)
    assert found == as_dict(RowEdits(params, prompt, output, (7,)))


def test_without_penalties_nothing_is_counted_and_stops_are_banned_for_a_while() -> None:
    edits = RowEdits(SamplingParams(logit_bias={2: 5.0}), [1, 1], [4], (2, 9))
    edits.append(6)
    assert as_dict(edits, ban_stops=True) == {2: (-1, -np.inf), 9: (-1, -np.inf)}
    assert as_dict(edits) == {2: (-1, 5.0), 9: (-1, 0.0)}


def test_as_many_biases_as_a_request_may_have() -> None:
    biases = {token * 3: float(token % 7) for token in range(300)}
    found = as_dict(RowEdits(SamplingParams(logit_bias=biases), [], [], ()))
    assert found == {token: (-1, bias) for token, bias in biases.items()}
