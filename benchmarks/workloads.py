"""Seeded workloads W1 to W4, the same token ids for every engine.

    w1       one request, 128 tokens in, 128 out
    w2       one request, 1024 in, 16 out
    w3c8     32 requests, 64 to 256 in, 16 to 128 out, 8 at a time
    w3c32    the same, all 32 at a time
    w4       16 requests that share their first 512 tokens, 32 tokens of their own, 32 out
    w4warm   the same 512 tokens again with other endings

Prompts are cut from the Python language reference as ``pydoc_data.topics`` ships it. Each repetition has prompts of its
own, so that no engine is served from a prefix cache that an earlier one filled; lengths are the same every time.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

NAMES = ("w1", "w2", "w3c8", "w3c32", "w4", "w4warm")


@dataclass(frozen=True)
class Request:
    """One greedy completion of exactly ``num_output`` tokens."""

    prompt: list[int]
    num_output: int


@dataclass(frozen=True)
class Workload:
    """Requests that are sent in order, ``concurrency`` at a time."""

    name: str
    requests: list[Request]
    concurrency: int


def corpus() -> str:
    """About 700,000 characters of English prose about Python."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))


class WorkloadMaker:
    """Cuts prompts out of the corpus; ``scale`` divides all lengths and counts for a quick look at whether it works.

    ``shorter`` divides the lengths of w3 and w4 alone, for a large model.
    """

    def __init__(self, encode: Callable[[str], list[int]], scale: int = 1, shorter: int = 1) -> None:
        self._ids = encode(corpus())
        self._scale, self._shorter = scale, shorter

    def make(self, name: str, repetition: int) -> Workload:
        """One workload of one repetition."""
        rng = random.Random(f"{name.removesuffix('warm')}/{repetition}")
        if name == "w1":
            return Workload(name, [self._request(rng, 128, 128)], 1)
        if name == "w2":
            return Workload(name, [self._request(rng, 1024, 16)], 1)
        if name in ("w3c8", "w3c32"):
            shapes = random.Random("w3")
            lengths = [(shapes.randint(64, 256), shapes.randint(16, 128)) for _ in range(self._small(32))]
            requests = [self._request(rng, ins // self._shorter, outs // self._shorter) for ins, outs in lengths]
            return Workload(name, requests, int(name[3:]))
        if name in ("w4", "w4warm"):
            prefix, own = self._cut(rng, 512 // self._shorter), 32 // self._shorter
            if name == "w4warm":
                rng = random.Random(f"{name}/{repetition}")
            requests = [self._request(rng, own, own, prefix) for _ in range(self._small(16))]
            return Workload(name, requests, 16)
        raise SystemExit(f"unknown workload {name!r}; there are {', '.join(NAMES)}")

    def first_request(self) -> Workload:
        """One token after eight: shows that an engine is ready."""
        return Workload("first", [Request(self._ids[:8], 1)], 1)

    def warm_up(self) -> Workload:
        """A few requests, W1's and W2's lengths among them, that make an engine build what it builds on first use."""
        rng = random.Random("warm-up")
        lengths = (48, 48, 48, 48, 128, 1024)
        return Workload("warm-up", [self._request(rng, length, 8) for length in lengths], 2)

    def _request(self, rng: random.Random, length: int, num_output: int, prefix: list[int] | None = None) -> Request:
        return Request((prefix or []) + self._cut(rng, length), self._small(num_output))

    def _cut(self, rng: random.Random, length: int) -> list[int]:
        length = self._small(length)
        start = rng.randrange(len(self._ids) - length)
        return self._ids[start : start + length]

    def _small(self, number: int) -> int:
        return max(2, number // self._scale)
