"""Load for an OpenAI-compatible server: closed loop with a fixed concurrency, or open loop with a request rate."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from ..errors import TwofoldError
from .openai_client import OpenAIClient
from .percentiles import summary

_VOCABULARY = """river engine winter copper garden signal letter window market harbor silver planet motor bridge forest
number paper travel music island candle thunder answer pattern village circle season ladder mirror valley sunset"""
_WORDS = _VOCABULARY.split()


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What to send. ``rate`` is requests per second with Poisson arrivals; None sends as soon as a slot is free."""

    num_requests: int = 100
    concurrency: int = 8
    rate: float | None = None
    input_len: int = 256
    output_len: int = 128
    range_ratio: float = 0.0
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One request: its prompt (text or token ids), how many tokens to ask for, and when (seconds from the start)."""

    prompt: str | list[int]
    output_len: int
    due: float = 0.0


@dataclass(slots=True)
class Outcome:
    """What became of one job: arrival times of its text, token counts from the server's usage, or an error."""

    started: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    error: str | None = None

    @property
    def time_to_first_token(self) -> float:
        """Seconds from sending to the first text."""
        return self.arrivals[0] - self.started

    @property
    def gaps(self) -> list[float]:
        """Seconds between pieces of text (inter-token latency where the server sends each token by itself)."""
        return [later - earlier for earlier, later in itertools.pairwise(self.arrivals)]

    @property
    def time_per_output_token(self) -> float | None:
        """Mean seconds per token after the first; None for outputs of one token."""
        if self.num_output_tokens < 2 or len(self.arrivals) < 2:
            return None
        return (self.arrivals[-1] - self.arrivals[0]) / (self.num_output_tokens - 1)


def make_jobs(load: Load, words_per_token: float, tag: str = "") -> list[Job]:
    """Seeded jobs of varied wording; lengths lie within ``1 +- range_ratio`` of the asked ones.

    Prompts open with ``tag`` and their number, so that a prefix cache serves neither another job nor an earlier run.
    """
    rng = random.Random(load.seed)
    jobs, due = [], 0.0
    for index in range(load.num_requests):
        length, output = (_vary(rng, n, load.range_ratio) for n in (load.input_len, load.output_len))
        words = [rng.choice(_WORDS) for _ in range(max(1, round(length * words_per_token) - 4))]
        jobs.append(Job(prompt=f"{tag} item {index}: " + " ".join(words), output_len=output, due=due))
        due += rng.expovariate(load.rate) if load.rate else 0.0
    return jobs


def calibrate(client: OpenAIClient, model: str) -> float:
    """How many of our words make one token for this model, learned from the usage of one short request."""
    outcome = send(client, model, Job(prompt=" ".join(_WORDS), output_len=1))
    if outcome.error:
        raise TwofoldError(f"the first request failed: {outcome.error}")
    return len(_WORDS) / outcome.num_prompt_tokens if outcome.num_prompt_tokens else 1.0


def send(client: OpenAIClient, model: str, job: Job, extra: dict[str, Any] | None = None) -> Outcome:
    """Send one job greedily and record it; an error is a result, not an exception."""
    body = {
        "model": model,
        "prompt": job.prompt,
        "max_tokens": job.output_len,
        "temperature": 0,
        "stream_options": {"include_usage": True},
        **(extra or {}),
    }
    outcome = Outcome(started=time.perf_counter())
    try:
        for arrived, event in client.stream("/v1/completions", body):
            if any(choice.get("text") for choice in event.get("choices") or []):
                outcome.arrivals.append(arrived)
            if usage := event.get("usage"):
                outcome.num_prompt_tokens = usage.get("prompt_tokens", 0)
                outcome.num_output_tokens = usage.get("completion_tokens", 0)
    except TwofoldError as error:
        outcome.error = str(error)
    outcome.num_output_tokens = outcome.num_output_tokens or len(outcome.arrivals)
    if not outcome.arrivals and outcome.error is None:
        outcome.error = "the server sent no text"
    return outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All outcomes of one run and its wall time."""

    outcomes: list[Outcome]
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """Figures by name; times in milliseconds, rates per second. Failed requests only count in ``num_failed``."""
        good = [outcome for outcome in self.outcomes if outcome.error is None]
        prompt = sum(outcome.num_prompt_tokens for outcome in good)
        output = sum(outcome.num_output_tokens for outcome in good)
        per_token = [value for outcome in good if (value := outcome.time_per_output_token) is not None]
        return {
            "num_requests": len(self.outcomes),
            "num_failed": len(self.outcomes) - len(good),
            "first_error": next((outcome.error for outcome in self.outcomes if outcome.error), None),
            "seconds": self.seconds,
            "prompt_tokens": prompt,
            "output_tokens": output,
            "requests_per_second": len(good) / self.seconds,
            "output_tokens_per_second": output / self.seconds,
            "total_tokens_per_second": (prompt + output) / self.seconds,
            "ttft_ms": _milliseconds([outcome.time_to_first_token for outcome in good]),
            "itl_ms": _milliseconds([gap for outcome in good for gap in outcome.gaps]),
            "tpot_ms": _milliseconds(per_token),
        }


def run_load(client: OpenAIClient, model: str, jobs: Sequence[Job], concurrency: int, extra: dict[str, Any]) -> Report:
    """Send all jobs, at most ``concurrency`` at once and none before it is due."""
    start = time.perf_counter()
    lock = threading.Lock()
    outcomes: list[Outcome] = []

    def work(job: Job) -> None:
        time.sleep(max(0.0, start + job.due - time.perf_counter()))
        outcome = send(client, model, job, extra)
        with lock:
            outcomes.append(outcome)

    with ThreadPoolExecutor(concurrency) as pool:
        list(pool.map(work, jobs))
    return Report(outcomes=outcomes, seconds=time.perf_counter() - start)


def _milliseconds(seconds: list[float]) -> dict[str, float]:
    return summary([1000 * value for value in seconds])


def _vary(rng: random.Random, length: int, ratio: float) -> int:
    return max(1, rng.randint(round(length * (1 - ratio)), round(length * (1 + ratio))))
