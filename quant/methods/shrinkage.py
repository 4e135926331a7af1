"""Second moments that do not follow the noise of few calibration tokens."""

from __future__ import annotations

from torch import Tensor

# Tokens of a text depend on each other: so many of them tell as much as one drawn on its own.
TOKENS_PER_DRAW = 2


def shrunk(hessian: Tensor, num_tokens: int) -> Tensor:
    """``hessian`` [K, K] of ``num_tokens`` inputs with products of different features made smaller, all by one factor.

    Columns make up for each other's errors by these products, and by what is chance in them too: with few tokens for
    many features a result is good for the calibration text only. The factor is the one with the least expected
    squared error of the correlations (Schäfer and Strimmer 2005, for inputs drawn from a normal distribution).
    """
    diagonal = hessian.diagonal()
    powers = diagonal.clamp(min=1e-30).rsqrt()
    squares = (hessian * powers[:, None] * powers).square_().clamp_(max=1.0)
    squares.fill_diagonal_(0.0)
    total = float(squares.sum())
    if not total > 0.0:
        return hessian
    # Dead features have no correlations to be wrong about.
    alive = (diagonal > 0).float()
    noise = float(alive @ (1 - squares).square_().fill_diagonal_(0.0) @ alive)
    share = min(1.0, max(0.0, noise * TOKENS_PER_DRAW / (num_tokens * total)))
    smaller = hessian * (1.0 - share)
    smaller.diagonal().copy_(diagonal)
    return smaller
