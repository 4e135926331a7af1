"""The cheap histogram shows what prometheus_client's own shows."""

from __future__ import annotations

import random

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from twofold.server.histogram import FastHistogram

BOUNDS = (0.001, 0.5, 1.0, 2.5, 100.0)


def shown(registry: CollectorRegistry) -> list[str]:
    return [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]


def test_the_same_text() -> None:
    rng = random.Random(3)
    own, theirs = CollectorRegistry(), CollectorRegistry()
    fast = FastHistogram("t_seconds", "Times", BOUNDS)
    own.register(fast)
    slow = Histogram("t_seconds", "Times", buckets=BOUNDS, registry=theirs)
    assert shown(own) == shown(theirs)
    for value in [*BOUNDS, 0.0, 1e9, *(rng.expovariate(1.0) for _ in range(200))]:
        fast.observe(value)
        slow.observe(value)
    assert shown(own) == shown(theirs)
