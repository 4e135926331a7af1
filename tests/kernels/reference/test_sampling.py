"""Filters and drawing against an independent definition in float64, row by row."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sampling_cases import KINDS, check_ugly, chi_square, options_of
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from twofold.kernels.reference import argmax, draw_tokens, edit_logits
from twofold.kernels.sampling_options import LogitEdits


def drawn_set(logits: torch.Tensor, **row: float) -> set[int]:
    """Every token that some uniform number leads to, over a fine grid."""
    numbers = np.linspace(0.0, 1.0, 401)[:-1]
    return set(draw_tokens(logits.expand(len(numbers), -1), options_of([row] * len(numbers), numbers)).tolist())


def warped(logits: torch.Tensor, **row: float) -> torch.Tensor:
    """Probabilities as transformers filters them."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(row.get("temperature", 1.0))])
    if row.get("top_k"):
        warpers.append(TopKLogitsWarper(int(row["top_k"])))
    if row.get("top_p", 1.0) < 1.0:
        warpers.append(TopPLogitsWarper(row["top_p"]))
    if row.get("min_p"):
        warpers.append(MinPLogitsWarper(row["min_p"]))
    return warpers(None, logits.double()[None])[0].softmax(-1)


@pytest.mark.parametrize("row, kept", [
    ({"temperature": 2.0, "top_p": 0.6}, {0, 1, 2}),
    ({"temperature": 0.5, "top_p": 0.6}, {0}),
    ({"top_k": 2, "top_p": 0.6}, {0}),
    ({"min_p": 0.25}, {0, 1, 2}),
    ({"min_p": 0.25, "temperature": 2.0}, {0, 1, 2, 3}),
    ({"top_k": 4, "min_p": 0.25}, {0, 1, 2}),
    ({"top_k": 2}, {0, 1}),
    ({}, {0, 1, 2, 3, 4}),
])  # fmt: skip
def test_order_of_the_filters(row: dict[str, float], kept: set[int]) -> None:  # B056
    logits = torch.tensor([[0.5, 0.25, 0.15, 0.07, 0.03]]).log()
    assert drawn_set(logits, **row) == kept
    assert {int(i) for i in warped(logits[0], **row).nonzero()} == kept


@pytest.mark.parametrize("row", [
    {},
    {"temperature": 0.7},
    {"top_k": 50},
    {"top_k": 700},
    {"top_p": 0.9},
    {"min_p": 0.05},
    {"temperature": 1.3, "top_k": 40, "top_p": 0.8, "min_p": 0.1},
    {"temperature": 1.3, "top_p": 0.95, "min_p": 0.02},
])  # fmt: skip
@pytest.mark.parametrize("num_columns", [300, 2003])
def test_frequencies_are_those_of_transformers(row: dict[str, float], num_columns: int) -> None:
    logits = torch.randn(num_columns, generator=torch.Generator().manual_seed(3)) * 2.5
    expected = warped(logits, **row)
    num_draws = 4000
    numbers = (np.arange(num_draws) + 0.5) / num_draws
    parts = [
        draw_tokens(logits.expand(len(part), -1), options_of([row] * len(part), part)) for part in np.split(numbers, 20)
    ]
    shares = torch.cat(parts).bincount(minlength=num_columns).double() / num_draws
    # An even grid of numbers gives each token its probability up to one step of the grid at either end.
    assert (shares - expected).abs().max() <= 2.0 / num_draws
    assert (shares[expected == 0.0] == 0.0).all()


@pytest.mark.parametrize("temperature", [1e-2, 1e-4, 2e-5])
@pytest.mark.parametrize("row", [{}, {"top_p": 1e-10}, {"top_p": 1e-4}, {"min_p": 1.0}, {"top_k": 5}])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_tiny_values_give_the_best_token(temperature: float, row: dict[str, float], dtype: torch.dtype) -> None:  # B047
    logits = torch.linspace(-11, 11, 500).roll(123)[None].to(dtype).float()
    logits[0, 77] = 11.5
    assert drawn_set(logits, temperature=temperature, **row) == {77}


@pytest.mark.parametrize(
    "row",
    [
        {"top_p": 1e-10},
        {"top_p": 1e-300},
        {"top_p": 1e-300, "top_k": 5},
        {"min_p": 1.0},
        {"top_p": 1e-4, "min_p": 1.0},
        {"top_k": 1},
    ],
)
def test_at_least_the_best_token_stays(row: dict[str, float]) -> None:  # B047
    logits = torch.randn(1, 5000)
    assert drawn_set(logits, **row) == {int(logits.argmax())}


def test_every_row_is_drawn_as_if_alone() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(12, 5000, generator=generator) * 3
    kinds: list[dict[str, float]] = [
        {}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.2}, {"top_k": 100, "top_p": 0.9}, {"temperature": 0.3},
    ]  # fmt: skip
    rows = [kinds[i % 6] for i in range(12)]
    numbers = np.random.default_rng(0).random(12)
    together = draw_tokens(logits, options_of(rows, numbers)).tolist()
    alone = [int(draw_tokens(logits[i : i + 1], options_of([rows[i]], numbers[i : i + 1]))) for i in range(12)]
    assert together == alone
    order = list(reversed(range(12)))
    assert draw_tokens(logits[order], options_of([rows[i] for i in order], numbers[order])).tolist() == together[::-1]


def test_numbers_at_the_ends() -> None:
    logits = torch.tensor([[0.0, -math.inf, 1.0, -math.inf]])
    for row in ({}, {"top_k": 3}, {"top_p": 0.999999}):
        assert draw_tokens(logits, options_of([row], 0.0)).item() in (0, 2)
        assert draw_tokens(logits, options_of([row], 1.0 - 2.0**-53)).item() in (0, 2)


@pytest.mark.parametrize("row", [{}, {"top_k": 3}, {"top_p": 0.9}])
def test_rows_without_a_finite_maximum(row: dict[str, float]) -> None:
    logits = torch.randn(4, 300)
    logits[1, 7] = math.nan
    logits[2] = -math.inf
    logits[3, 9] = math.inf
    tokens = draw_tokens(logits, options_of([row] * 4)).tolist()
    assert tokens[0] >= 0 and tokens[1:] == [-1, -1, -1]


@pytest.mark.parametrize("num_columns", [2, 1000, 1500])
def test_ugly_rows(num_columns: int) -> None:
    check_ugly(draw_tokens, num_columns)


def test_one_column() -> None:
    logits = torch.tensor([[-3.0], [-math.inf], [math.nan]])
    for kind in KINDS:
        assert draw_tokens(logits, options_of([kind] * 3, 0.9)).tolist() == [0, -1, -1]


@pytest.mark.parametrize("row", [{}, {"top_k": 8}, {"top_p": 0.7, "temperature": 1.4}, {"min_p": 0.1}])
def test_seeded_draws_have_the_right_distribution(row: dict[str, float]) -> None:
    statistic, freedom = chi_square(draw_tokens, 5000, row)
    # The mean is the degrees of freedom, the variance twice them: 4 deviations.
    assert statistic < freedom + 4 * math.sqrt(2 * freedom)


def test_equals_of_the_last_token_stay() -> None:
    logits = torch.tensor([[1.0, 2.0, 1.0, 1.0, 0.0]])
    assert drawn_set(logits, top_k=2) == {0, 1, 2, 3}
    assert drawn_set(logits, top_p=0.5) == {0, 1, 2, 3}


def test_argmax() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0], [2.0, math.nan, 9.0], [-math.inf] * 3, [0.0, math.inf, 1.0]])
    assert argmax(logits).tolist() == [1, -1, -1, -1]


def test_edits_by_hand() -> None:
    logits = torch.tensor([[1.0, -2.0, 3.0, 4.0], [1.0, 1.0, 1.0, 1.0]])
    edit_logits(
        logits,
        LogitEdits(
            rows=np.array([0, 0, 0, 1]),
            tokens=np.array([0, 1, 2, 3]),
            counts=np.array([0, 3, -1, 1], dtype=np.int32),
            bias=np.array([1.0, 0.0, 0.5, -math.inf], dtype=np.float32),
            repetition_penalty=np.array([2.0, 2.0], dtype=np.float32),
            presence_penalty=np.array([0.25, 9.0], dtype=np.float32),
            frequency_penalty=np.array([0.5, 9.0], dtype=np.float32),
        ),
    )
    assert logits[0].tolist() == [1.0, -5.75, 3.5, 4.0]
    assert logits[1].tolist() == [1.0, 1.0, 1.0, -math.inf]
