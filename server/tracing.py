"""OpenTelemetry traces: a span per request of the engine, sent to a collector over OTLP/HTTP.

The names of the attributes are those of the conventions for generative AI, and the ``gen_ai.latency`` ones that vLLM
adds.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

from ..engine.messages import EngineRequest
from ..engine.outputs import SampleDelta
from ..errors import ConfigError
from .metrics import Metrics, RequestTimer

_EXPORT_SECONDS = 5
# The headers by which a caller says which trace it belongs to.
_carrier: ContextVar[Mapping[str, str] | None] = ContextVar("twofold_trace_carrier", default=None)


def enter_trace(headers: Mapping[str, str]) -> None:
    """Spans of what this task starts from now on belong to the trace that ``headers`` name."""
    _carrier.set(headers)


class Tracing:
    """Spans of one server. ``exporter`` takes them in place of the collector at ``endpoint``."""

    def __init__(self, endpoint: str, exporter: Any = None) -> None:
        self._sdk = _Sdk()
        if exporter is None:
            exporter = self._sdk.exporter(endpoint)
        self._provider = self._sdk.provider(resource=self._resource())
        self._provider.add_span_processor(self._sdk.processor(exporter))
        self._tracer = self._provider.get_tracer("twofold.server")

    def timer(self, metrics: Metrics, model: str, request: EngineRequest, arrival: float) -> RequestTimer:
        """A timer that makes a span when its request has ended."""
        return _TracedTimer(self, metrics, model, request, arrival)

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()

    def record(self, start: float, attributes: Mapping[str, Any], error: str | None) -> None:
        """One span from ``start`` (seconds since the epoch) until now."""
        sdk = self._sdk
        context = sdk.extract(dict(_carrier.get() or {}))
        span = self._tracer.start_span(
            "llm_request", context, sdk.server_kind, attributes=attributes, start_time=int(start * 1e9)
        )
        if error is not None:
            span.set_status(sdk.error_status(error))
        span.end()

    def _resource(self) -> Any:
        resource = self._sdk.resource.create()
        if str(resource.attributes["service.name"]).startswith("unknown_service"):
            resource = resource.merge(self._sdk.resource({"service.name": "twofold"}))
        return resource


class _Sdk:
    """What is used of OpenTelemetry's packages, imported only where traces are wanted (ConfigError without them)."""

    def __init__(self) -> None:
        try:
            from opentelemetry.propagate import extract
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace import SpanKind, Status, StatusCode
        except ImportError as error:
            raise _missing(error) from None
        self.extract: Any = extract
        self.resource: Any = Resource
        self.provider: Any = TracerProvider
        self.processor: Any = BatchSpanProcessor
        self.server_kind: Any = SpanKind.SERVER
        self._status, self._error = Status, StatusCode.ERROR

    def exporter(self, endpoint: str) -> Any:
        """To a collector, over HTTP (ConfigError without the package)."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        except ImportError as error:
            raise _missing(error) from None
        return OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT_SECONDS)

    def error_status(self, message: str) -> Any:
        return self._status(self._error, message)


def _missing(error: ImportError) -> ConfigError:
    return ConfigError(
        f"traces need OpenTelemetry's packages ({error}); install them with: pip install 'twofold[otel]'"
    )


class _TracedTimer(RequestTimer):
    """The times of one request, as metrics and as a span."""

    def __init__(self, tracing: Tracing, metrics: Metrics, model: str, request: EngineRequest, arrival: float) -> None:
        super().__init__(metrics, arrival)
        self._tracing = tracing
        self._request = request
        self._model = model
        self._began = arrival
        self._first: float | None = None
        self._queued: float | None = None
        self._completion: dict[int, int] = {}
        self._cached = 0
        self._reasons: dict[int, str] = {}
        self._error: str | None = None

    def observe(self, delta: SampleDelta) -> None:
        super().observe(delta)
        if delta.token_ids and self._first is None:
            self._first = time.monotonic()
        self._completion[delta.index] = delta.num_completion_tokens
        self._cached = max(self._cached, delta.num_cached_tokens)
        if delta.queue_seconds is not None and delta.index == 0:
            self._queued = delta.queue_seconds
        if delta.finish_reason is not None:
            self._reasons[delta.index] = delta.finish_reason
        self._error = self._error or delta.error

    def close(self) -> None:
        super().close()
        seconds = time.monotonic() - self._began
        unfinished = len(self._reasons) < self._request.params.n
        error = self._error or ("the request was ended before its answer was complete" if unfinished else None)
        self._tracing.record(time.time() - seconds, self._attributes(seconds), error)

    def _attributes(self, seconds: float) -> dict[str, Any]:
        params = self._request.params
        num_prompt, num_output = len(self._request.prompt_token_ids), sum(self._completion.values())
        values: dict[str, Any] = {
            "gen_ai.operation.name": "text_completion" if self._request.pooling is None else "embeddings",
            "gen_ai.request.id": self._request.request_id,
            "gen_ai.request.model": self._model,
            "gen_ai.response.model": self._model,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": float(params.temperature),
            "gen_ai.request.top_p": float(params.top_p),
            "gen_ai.request.n": params.n,
            "gen_ai.usage.num_sequences": params.n,
            "gen_ai.usage.prompt_tokens": num_prompt,
            "gen_ai.usage.completion_tokens": num_output,
            "gen_ai.usage.input_tokens": num_prompt,
            "gen_ai.usage.output_tokens": num_output,
            "gen_ai.usage.cache_read.input_tokens": self._cached,
            "gen_ai.response.finish_reasons": [reason for _, reason in sorted(self._reasons.items())],
            **self._latencies(seconds),
        }
        return {name: value for name, value in values.items() if value is not None}

    def _latencies(self, seconds: float) -> dict[str, float | None]:
        """Seconds; those that nobody measured are left out."""
        first = None if self._first is None else self._first - self._began
        latencies: dict[str, float | None] = {
            "e2e": seconds,
            "time_to_first_token": first,
            "time_in_queue": self._queued,
        }
        if first is not None:
            latencies["time_in_model_decode"] = seconds - first
            if self._queued is not None:
                latencies["time_in_model_prefill"] = max(0.0, first - self._queued)
                latencies["time_in_model_inference"] = max(0.0, seconds - self._queued)
        return {f"gen_ai.latency.{name}": value for name, value in latencies.items()}
