"""Draws judged by an independent definition: transformers' filters or plain numpy in float64, row by row."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from twofold.engine.core.randomness import uniform
from twofold.kernels.sampling_options import DrawOptions, LogitEdits

Draw = Callable[[Tensor, DrawOptions], Tensor]
Row = dict[str, float]

KINDS: list[Row] = [
    {},
    {"temperature": 0.7},
    {"temperature": 0.0},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 700},
    {"top_p": 0.9},
    {"top_p": 0.3, "temperature": 1.7},
    {"top_p": 1e-10},
    {"min_p": 0.05},
    {"temperature": 1.3, "top_k": 40, "top_p": 0.8, "min_p": 0.1},
    {"temperature": 2e-5, "top_p": 0.999},
    {"top_k": 10**7, "top_p": 1.0},
]


def options_of(rows: Sequence[Row], numbers: Any = 0.5) -> DrawOptions:
    """Options of ``rows``; ``numbers`` are their uniform numbers."""

    def column(name: str, default: float, dtype: type) -> Any:
        return np.array([row.get(name, default) for row in rows], dtype=dtype)

    return DrawOptions(
        temperature=column("temperature", 1.0, np.float32),
        top_k=column("top_k", 0, np.int64),
        top_p=column("top_p", 1.0, np.float32),
        min_p=column("min_p", 0.0, np.float32),
        uniform=np.broadcast_to(np.asarray(numbers, dtype=np.float64), len(rows)).copy(),
    )


def probabilities(logits: Tensor, row: Row) -> Any:
    """float64 [V]: what a row's options leave, in numpy; equals of the last token kept stay, as the definition says."""
    values = logits.double().numpy()
    weights = np.exp((values - values.max()) / row.get("temperature", 1.0))
    kept = np.ones(len(values), dtype=bool)
    top_k = int(row.get("top_k", 0))
    if 0 < top_k < len(values):
        kept &= values >= np.sort(values)[-top_k]
    if row.get("top_p", 1.0) < 1.0:
        order = np.argsort(-values, kind="stable")
        order = order[kept[order]]
        above = np.cumsum(weights[order]) - weights[order]
        inside = above < float(np.float32(row["top_p"])) * weights[order].sum()
        inside[0] = True
        kept &= values >= values[order[inside]].min()
    kept &= weights >= row.get("min_p", 0.0)
    weights = np.where(kept, weights, 0.0)
    return weights / weights.sum()


def check_draws(draw: Draw, logits: Tensor, rows: Sequence[Row], numbers: Any) -> None:
    """Every token lies where its uniform number falls in the cumulated probabilities, in the vocabulary's order."""
    tokens = draw(logits, options_of(rows, numbers)).tolist()
    for place, (token, row) in enumerate(zip(tokens, rows, strict=True)):
        best = logits[place].max().item()
        if not math.isfinite(best):
            assert token == -1, (place, row)
        elif row.get("temperature") == 0.0:
            assert token == logits[place].tolist().index(best), (place, row)
        else:
            _check_place(token, probabilities(logits[place], row), numbers[place], (place, row))


def _check_place(token: int, shares: Any, number: float, what: object) -> None:
    assert 0 <= token < len(shares) and shares[token] > 0, what
    end = float(shares[: token + 1].sum())
    assert end - shares[token] - 2e-6 <= number <= end + 2e-6, (what, token, end, number)


def ugly_logits(num_columns: int, seed: int = 0) -> Tensor:
    """Rows with ties, one spike, all equal, mostly minus infinity, nothing, a NaN, an infinity, and random ones."""
    logits = torch.randn(9, num_columns, generator=torch.Generator().manual_seed(seed)) * 3
    logits[1] = logits[1].round()
    logits[2, num_columns // 3] = 40.0
    logits[3] = 0.25
    logits[4, torch.arange(num_columns) % 3 > 0] = -math.inf
    logits[5] = -math.inf
    logits[6, num_columns - 1] = math.nan
    logits[7, num_columns // 2] = math.inf
    logits[8, ::2] = -0.0
    return logits


def check_ugly(draw: Draw, num_columns: int, kinds: Sequence[Row] = KINDS) -> None:
    """Every kind of options over every ugly row, one launch per kind and one with kinds mixed."""
    logits = ugly_logits(num_columns)
    numbers = np.random.default_rng(num_columns).random(len(logits))
    for kind in kinds:
        check_draws(draw, logits, [kind] * len(logits), numbers)
    check_draws(draw, logits, [kinds[place % len(kinds)] for place in range(len(logits))], numbers)


def chi_square(draw: Draw, num_draws: int, row: Row) -> tuple[float, int]:
    """(statistic, degrees of freedom) of the tokens of one seeded request against float64 probabilities."""
    logits = torch.randn(40, generator=torch.Generator().manual_seed(5)) * 1.5
    zeros = np.zeros(num_draws, dtype=np.uint64)
    numbers = uniform(zeros + np.uint64(12345), zeros, np.arange(num_draws, dtype=np.uint64))
    tokens = draw(logits.expand(num_draws, -1).contiguous(), options_of([row] * num_draws, numbers))
    expected = probabilities(logits, row) * num_draws
    observed = np.bincount(tokens.numpy(), minlength=40)
    assert (observed[expected == 0] == 0).all()
    common = expected > 5
    counts = np.append(observed[common], observed[~common].sum())
    means = np.append(expected[common], expected[~common].sum())
    counts, means = counts[means > 0], means[means > 0]
    return float(((counts - means) ** 2 / means).sum()), len(means) - 1


def random_edits(num_rows: int, num_columns: int) -> tuple[Tensor, LogitEdits]:
    """Logits, and edits of about a third of their entries: seen or not, biased, banned."""
    generator = np.random.default_rng(num_columns)
    places = np.flatnonzero(generator.random(num_rows * num_columns) < 0.3)
    bias = generator.choice(np.array([0.0, 2.5, -1.0, -np.inf], dtype=np.float32), len(places))
    edits = LogitEdits(
        rows=places // num_columns,
        tokens=places % num_columns,
        counts=generator.integers(-1, 5, len(places)).astype(np.int32),
        bias=bias,
        repetition_penalty=generator.uniform(0.5, 2, num_rows).astype(np.float32),
        presence_penalty=generator.uniform(-2, 2, num_rows).astype(np.float32),
        frequency_penalty=generator.uniform(-2, 2, num_rows).astype(np.float32),
    )
    return torch.randn(num_rows, num_columns, generator=torch.Generator().manual_seed(0)) * 3, edits
