"""Draws, argmax and edits in the interpreter against float64 definitions and the reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sampling_cases import KINDS, check_ugly, options_of, random_edits, ugly_logits
from twofold.engine.core.randomness import uniform
from twofold.kernels import reference
from twofold.kernels.triton.sampling import argmax, draw_tokens, edit_logits


@pytest.mark.parametrize("num_columns", [2, 1000, 2500])
def test_ugly_rows(num_columns: int) -> None:
    kinds = KINDS[1::2] if num_columns == 1000 else KINDS[4::6]
    check_ugly(draw_tokens, num_columns, kinds)


def test_tokens_are_those_of_the_reference_and_of_a_row_alone() -> None:
    rows = [KINDS[place % len(KINDS)] for place in range(13)]
    logits = torch.randn(13, 3100, generator=torch.Generator().manual_seed(1))[:, :3000] * 2
    keys = np.arange(13, dtype=np.uint64)
    options = options_of(rows, uniform(keys, keys, keys))
    tokens = draw_tokens(logits, options)
    assert torch.equal(tokens, reference.draw_tokens(logits, options))
    for place in (3, 6, 10):
        one = options_of(rows[place : place + 1], options.uniform[place])
        assert draw_tokens(logits[place : place + 1], one).item() == tokens[place]


def test_argmax() -> None:
    for logits in (ugly_logits(1500), torch.tensor([[-2.0], [float("nan")]]), torch.empty(0, 5)):
        assert torch.equal(argmax(logits), reference.argmax(logits))


def test_edits() -> None:
    logits, edits = random_edits(5, 300)
    expected = logits.clone()
    reference.edit_logits(expected, edits)
    edit_logits(logits, edits)
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-6)
