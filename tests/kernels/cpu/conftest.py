"""The kernels' tests run on several threads, whatever the machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from twofold.platforms import cpu_threads


@pytest.fixture(autouse=True)
def three_threads() -> Iterator[None]:
    before = cpu_threads.num_threads()
    cpu_threads.set_num_threads(3)
    yield
    cpu_threads.set_num_threads(before)
