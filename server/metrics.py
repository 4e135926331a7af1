"""/metrics: the engine's counters and the times that clients see, for Prometheus."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from starlette.requests import Request
from starlette.responses import Response

from ..engine.messages import EngineRequest, EngineStats
from ..engine.outputs import SampleDelta
from .histogram import FastHistogram

if TYPE_CHECKING:
    from .state import ServerState

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_OWN_NAME = re.compile(r"^((?:# (?:HELP|TYPE) )?)twofold_")
_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0)
_NEXT_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_WHOLE = (0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 60.0, 120.0, 240.0)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


class Metrics:
    """All families of one server, in a registry of its own so that several servers can live in one process."""

    def __init__(self, state: ServerState) -> None:
        self.registry = CollectorRegistry()
        self._state = state

        def histogram(name: str, text: str, buckets: Iterable[float]) -> Histogram:
            return Histogram(f"twofold_{name}", text, buckets=tuple(buckets), registry=self.registry)

        self.time_to_first_token = histogram(
            "time_to_first_token_seconds", "From the arrival of a request to its first token", _FIRST_TOKEN
        )
        self.inter_token_latency = FastHistogram(
            "twofold_inter_token_latency_seconds", "Between two tokens of a sample", _NEXT_TOKEN
        )
        self.registry.register(self.inter_token_latency)
        self.request_latency = histogram(
            "e2e_request_latency_seconds", "From the arrival of a request to its end", _WHOLE
        )
        self.prompt_tokens = histogram("request_prompt_tokens", "Prompt tokens of a request", _TOKENS)
        self.generation_tokens = histogram("request_generation_tokens", "Generated tokens of a request", _TOKENS)
        self.success = Counter(
            "twofold_request_success", "Samples that finished, by reason", ["finished_reason"], registry=self.registry
        )
        self.http_requests = Counter(
            "twofold_http_requests", "Answered HTTP requests", ["handler", "status"], registry=self.registry
        )
        self.registry.register(_EngineCollector(state))
        ProcessCollector(registry=self.registry)

    def timer(self, request: EngineRequest, arrival: float) -> RequestTimer:
        """Measures one engine request; ``arrival`` is in ``time.monotonic()`` seconds."""
        self.prompt_tokens.observe(len(request.prompt_token_ids))
        tracing = self._state.tracing
        if tracing is not None:
            return tracing.timer(self, self._state.served_names[0], request, arrival)
        return RequestTimer(self, arrival)


class RequestTimer:
    """The times of one request, over all its samples."""

    def __init__(self, metrics: Metrics, arrival: float) -> None:
        self._metrics = metrics
        self._arrival = arrival
        self._last: dict[int, float] = {}
        self._num_tokens: dict[int, int] = {}

    def observe(self, delta: SampleDelta) -> None:
        """Take in one delta as it arrives."""
        now = time.monotonic()
        if delta.token_ids:
            if not self._last:
                self._metrics.time_to_first_token.observe(now - self._arrival)
            elif delta.index in self._last:
                self._metrics.inter_token_latency.observe((now - self._last[delta.index]) / len(delta.token_ids))
            self._last[delta.index] = now
            self._num_tokens[delta.index] = delta.num_completion_tokens
        if delta.finish_reason is not None:
            self._metrics.success.labels(delta.finish_reason).inc()

    def close(self) -> None:
        """The request has ended, in whatever way."""
        self._metrics.request_latency.observe(time.monotonic() - self._arrival)
        self._metrics.generation_tokens.observe(sum(self._num_tokens.values()))


class _EngineCollector:
    """Reads the engine's own statistics when somebody asks."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        state = self._state
        up = state.client is not None and not state.client.errored
        yield _gauge("engine_up", "1 while the engine is loaded and alive", float(up))
        yield _gauge("num_open_http_requests", "HTTP requests being answered", float(state.num_open))
        stats = state.client.stats() if state.client is not None else EngineStats()
        usage = stats.num_live_blocks / stats.num_blocks if stats.num_blocks else 0.0
        yield _gauge("num_requests_running", "Samples that the engine computes", stats.num_running)
        yield _gauge("num_requests_waiting", "Samples that wait for the engine", stats.num_waiting)
        yield _gauge("kv_cache_usage_perc", "Live part of the KV blocks; 1 is all of them", usage)
        yield _gauge("kv_cache_blocks", "KV blocks of the pool", stats.num_blocks)
        yield _gauge("kv_cache_live_blocks", "KV blocks that requests hold", stats.num_live_blocks)
        yield _gauge("kv_cache_cached_blocks", "KV blocks kept for reuse, held by no request", stats.num_cached_blocks)
        yield _counter("num_preemptions", "Samples that lost their blocks and were recomputed", stats.num_preemptions)
        yield _counter("prompt_tokens", "Prompt tokens admitted", stats.num_prompt_tokens)
        yield _counter("generation_tokens", "Tokens generated", stats.num_generated_tokens)
        yield _counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache", stats.num_prompt_tokens)
        yield _counter("prefix_cache_hits", "Prompt tokens found in the prefix cache", stats.num_cached_tokens)
        yield _counter("engine_steps", "Steps of the engine", stats.num_steps)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"twofold_{name}", text, value=value)


def _counter(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(f"twofold_{name}", text, value=value)


async def get_metrics(request: Request) -> Response:
    """The metrics, at any time, also while the model loads; ``?names=vllm`` names them as vLLM does."""
    state: ServerState = request.app.state.server
    text = generate_latest(state.metrics.registry).decode()
    if request.query_params.get("names") == "vllm":
        text = with_vllm_names(text, state.served_names[0] if state.served_names else "")
    return Response(text, media_type=CONTENT_TYPE)


def with_vllm_names(text: str, model: str) -> str:
    """The exposition with ``vllm:`` before our names and the label ``model_name``, by which those dashboards choose."""
    value = model.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    label = f'{{model_name="{value}"'
    lines = []
    for line in text.splitlines():
        if line.startswith("twofold_"):
            name, brace, rest = line.partition("{")
            if not brace:
                name, _, rest = line.partition(" ")
            line = f"{name}{label},{rest}" if brace else f"{name}{label}}} {rest}"
        lines.append(_OWN_NAME.sub(r"\1vllm:", line))
    return "\n".join(lines) + "\n"
