"""Random numbers by key: distinct, uniform, uncorrelated, and the same in any company."""

from __future__ import annotations

import numpy as np
from twofold.engine.core.randomness import uniform


def test_uniform_numbers_are_a_function_of_their_keys_alone() -> None:
    grid = np.array([(s, i, t) for s in (0, 1, 2**63 - 1) for i in range(3) for t in range(500)], dtype=np.uint64)
    numbers = uniform(grid[:, 0], grid[:, 1], grid[:, 2])
    assert len(set(numbers.tolist())) == len(grid) and numbers.min() >= 0.0 and numbers.max() < 1.0
    assert abs(numbers.mean() - 0.5) < 0.02 and abs(numbers.var() - 1 / 12) < 0.01
    picked = [1234, 5, 4000]
    assert uniform(*(grid[picked, column] for column in range(3))).tolist() == numbers[picked].tolist()


def test_neighbouring_steps_are_not_correlated() -> None:
    steps = np.arange(20000, dtype=np.uint64)
    zeros = np.zeros_like(steps)
    first, second = uniform(zeros, zeros, steps), uniform(zeros + np.uint64(1), zeros, steps)
    assert abs(np.corrcoef(first[1:], first[:-1])[0, 1]) < 0.03
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.03
