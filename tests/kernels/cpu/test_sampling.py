"""C draws, argmax and edits against float64 definitions and the reference, over rows of every awkward kind."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sampling_cases import KINDS, check_ugly, chi_square, options_of, random_edits, ugly_logits
from twofold.engine.core.randomness import uniform
from twofold.kernels import reference
from twofold.kernels.cpu import sampling
from twofold.kernels.cpu.library import unavailable

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=f"no compiled kernels: {unavailable()}")


@pytest.mark.parametrize("num_columns", [2, 255, 256, 1000, 5003])
def test_ugly_rows(num_columns):
    check_ugly(sampling.draw_tokens, num_columns)


def test_one_column_and_no_rows():
    logits = torch.tensor([[-3.0], [-math.inf], [math.nan]])
    for kind in KINDS:
        assert sampling.draw_tokens(logits, options_of([kind] * 3, 0.9)).tolist() == [0, -1, -1]
    assert sampling.draw_tokens(torch.empty(0, 7), options_of([])).tolist() == []


@pytest.mark.parametrize("num_columns", [700, 49152])
def test_tokens_are_those_of_the_reference(num_columns):
    rows = [KINDS[place % len(KINDS)] for place in range(39)]
    logits = torch.randn(39, num_columns + 5, generator=torch.Generator().manual_seed(1))[:, :num_columns] * 2
    keys = np.arange(39, dtype=np.uint64)
    options = options_of(rows, uniform(keys, keys, keys))
    tokens = sampling.draw_tokens(logits, options)
    assert torch.equal(tokens, reference.draw_tokens(logits, options))
    alone = [
        int(sampling.draw_tokens(logits[i : i + 1], options_of(rows[i : i + 1], options.uniform[i]))) for i in range(39)
    ]
    assert alone == tokens.tolist()


def test_a_flat_distribution_draws_from_everywhere():
    logits = torch.zeros(64, 3000)
    numbers = (np.arange(64) + 0.5) / 64
    for kind in ({}, {"top_p": 0.999}, {"top_k": 2999}, {"min_p": 1.0}):
        tokens = sampling.draw_tokens(logits, options_of([kind] * 64, numbers))
        assert tokens.tolist() == [int(number * 3000) for number in numbers]


@pytest.mark.parametrize("row", [{}, {"top_k": 8}, {"top_p": 0.7, "temperature": 1.4}, {"min_p": 0.1}])
def test_seeded_draws_have_the_right_distribution(row):
    statistic, freedom = chi_square(sampling.draw_tokens, 20000, row)
    assert statistic < freedom + 4 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("num_columns", [1, 3, 1000, 4099])
def test_argmax(num_columns):
    logits = ugly_logits(max(num_columns, 2))[:, :num_columns]
    assert torch.equal(sampling.argmax(logits), reference.argmax(logits))


def test_edits():
    logits, edits = random_edits(5, 300)
    expected = logits.clone()
    reference.edit_logits(expected, edits)
    sampling.edit_logits(logits, edits)
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-6)
