"""Clocks: how long one call takes on a device.

On a GPU the calls are captured in a graph, so that Python's time between launches is not measured, and a buffer larger
than the last cache is overwritten before each, so that weights come from memory as they do in a model of many layers.
The time of the overwriting alone is subtracted.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from ..platforms.interface import Platform

CALLS_PER_GRAPH = 10


class Clock(Protocol):
    """``seconds(call)`` is the time of one call. What the call raises is the caller's."""

    def seconds(self, call: Callable[[], Any]) -> float: ...


class HostClock:
    """The best of three means by the host's clock, after a warm-up that also compiles; ``budget`` seconds in all."""

    def __init__(self, platform: Platform, budget: float) -> None:
        self._platform, self._budget = platform, budget

    def seconds(self, call: Callable[[], Any]) -> float:
        call()
        count = max(1, int(self._budget / 3 / max(self._mean(call, 1), 1e-6)))
        return min(self._mean(call, count) for _ in range(3))

    def _mean(self, call: Callable[[], Any], count: int) -> float:
        self._platform.synchronize()
        begin = time.perf_counter()
        for _ in range(count):
            call()
        self._platform.synchronize()
        return (time.perf_counter() - begin) / count


class GraphClock:
    """Replays a graph of calls on cold caches; a call that cannot be captured is timed by the host's clock."""

    def __init__(self, platform: Platform, budget: float) -> None:
        self._host = HostClock(platform, budget)
        cache = getattr(torch.cuda.get_device_properties(platform.device), "L2_cache_size", 0)
        self._buffer = torch.empty(max(2 * cache, 64 << 20), dtype=torch.uint8, device=platform.device)
        self._overwriting = self._replays(lambda: None)

    def seconds(self, call: Callable[[], Any]) -> float:
        call()
        try:
            total = self._replays(call)
        except RuntimeError:  # it waits for the device, or allocates in a way that no graph can hold
            torch.cuda.synchronize()
            return self._host.seconds(call)
        return max(total - self._overwriting, 1e-7)

    def _replays(self, call: Callable[[], Any]) -> float:
        """Seconds of one overwriting and one call."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(CALLS_PER_GRAPH):
                self._buffer.zero_()
                call()
        return self._host.seconds(graph.replay) / CALLS_PER_GRAPH


def make_clock(platform: Platform, budget: float) -> Clock:
    """The clock that suits a device; ``budget`` seconds for each measurement."""
    if platform.spec.device_type == "cuda":
        return GraphClock(platform, budget)
    return HostClock(platform, budget)
