"""OpenTelemetry spans of requests: what they say, whose trace they belong to, and that they reach a collector."""

from __future__ import annotations

import http.server
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from http_server import RunningServer, counting_server
from twofold.errors import ConfigError
from twofold.server.config import ServerConfig
from twofold.server.tracing import Tracing

pytest.importorskip("opentelemetry.sdk.trace")

from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01"}


@pytest.fixture(scope="module")
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture(scope="module")
def traced(exporter: InMemorySpanExporter) -> Iterator[RunningServer]:
    with counting_server() as server:
        server.state.tracing = Tracing("", exporter)
        yield server


@pytest.fixture()
def spans(traced: RunningServer, exporter: InMemorySpanExporter) -> Any:
    """The spans that have ended since the test began."""
    exporter.clear()

    def get() -> list[Any]:
        assert traced.state.tracing is not None
        traced.wait_idle()
        traced.state.tracing._provider.force_flush()
        return list(exporter.get_finished_spans())

    return get


def test_attributes(traced: RunningServer, spans: Any) -> None:
    before = time.time_ns()
    fields = {"max_tokens": 5, "n": 2, "temperature": 0.5, "top_p": 0.9, "ignore_eos": True}
    answer = traced.complete("ab", **fields)
    (span,) = spans()
    assert span.name == "llm_request" and span.kind is SpanKind.SERVER and span.parent is None
    assert span.status.status_code is not StatusCode.ERROR
    found = span.attributes
    assert found["gen_ai.request.id"].startswith(answer["id"])
    assert found["gen_ai.request.model"] == found["gen_ai.response.model"] == traced.model
    assert (found["gen_ai.request.max_tokens"], found["gen_ai.request.n"]) == (5, 2)
    assert (found["gen_ai.request.temperature"], found["gen_ai.request.top_p"]) == (0.5, 0.9)
    assert found["gen_ai.usage.prompt_tokens"] == found["gen_ai.usage.input_tokens"] == 2
    assert found["gen_ai.usage.completion_tokens"] == answer["usage"]["completion_tokens"] == 10
    assert found["gen_ai.response.finish_reasons"] == ("length", "length")
    assert 0 <= found["gen_ai.latency.time_to_first_token"] <= found["gen_ai.latency.e2e"]
    assert before <= span.start_time <= span.end_time <= time.time_ns()
    assert span.resource.attributes["service.name"]
    assert "ab" not in str(dict(found)).replace(found["gen_ai.request.id"], ""), "no text in spans"


@pytest.mark.parametrize("fields", [{}, {"stop": "c"}, {"stop": "a"}, {"max_tokens": 1}])
@pytest.mark.parametrize("stream", [False, True])
def test_time_in_the_queue(chain: RunningServer, stream: bool, fields: dict[str, Any]) -> None:
    """However the answer ends: a stop string ends it in the server, before the core has a last word."""
    exporter = InMemorySpanExporter()
    chain.state.tracing = Tracing("", exporter)
    try:
        body = {"model": chain.model, "prompt": "e", "stream": stream, **fields}
        assert chain.post("/v1/completions", body).status_code == 200
        chain.wait_idle()
        chain.state.tracing._provider.force_flush()
    finally:
        chain.state.tracing.close()
        chain.state.tracing = None
    (span,) = exporter.get_finished_spans()
    found = span.attributes
    assert found is not None and 0 <= found["gen_ai.latency.time_in_queue"] <= found["gen_ai.latency.e2e"]


@pytest.mark.parametrize("stream", [False, True])
def test_the_callers_trace(traced: RunningServer, spans: Any, stream: bool) -> None:
    body = {"model": traced.model, "messages": [{"role": "user", "content": "a"}], "max_tokens": 3, "stream": stream}
    assert traced.post("/v1/chat/completions", body, headers=HEADERS).status_code == 200
    (span,) = spans()
    assert format(span.context.trace_id, "032x") == TRACE and format(span.parent.span_id, "016x") == PARENT
    traced.complete("b", max_tokens=1)
    assert format(spans()[-1].context.trace_id, "032x") != TRACE, "one request's trace is not the next one's"


def test_every_prompt_has_a_span(traced: RunningServer, spans: Any) -> None:
    body = {"model": traced.model, "prompt": ["a", "b", "c"], "max_tokens": 2}
    traced.post("/v1/completions", body, headers=HEADERS)
    found = spans()
    assert len(found) == 3 == len({span.attributes["gen_ai.request.id"] for span in found})
    assert {format(span.context.trace_id, "032x") for span in found} == {TRACE}


def test_an_answer_that_is_cut_off(traced: RunningServer, spans: Any) -> None:
    body = {"model": traced.model, "prompt": "a", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with traced.http.stream("POST", "/v1/completions", json=body) as response:
        next(response.iter_lines())
    (span,) = spans()
    assert span.status.status_code is StatusCode.ERROR


def test_a_collector() -> None:
    """Spans arrive as OTLP over HTTP, all of them once the server has closed."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    bodies: list[bytes] = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    collector = http.server.HTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=collector.serve_forever, daemon=True)
    thread.start()
    try:
        endpoint = f"http://127.0.0.1:{collector.server_port}/v1/traces"
        with counting_server(server={"otlp_traces_endpoint": endpoint}) as server:
            server.complete("a", max_tokens=2)
            server.wait_idle()
            assert server.state.tracing is not None
            server.state.tracing.close()
    finally:
        collector.shutdown()
        collector.server_close()
    requests = [ExportTraceServiceRequest.FromString(body) for body in bodies]
    spans = [span for item in requests for part in item.resource_spans for s in part.scope_spans for span in s.spans]
    assert [span.name for span in spans] == ["llm_request"]


def test_without_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"pip install 'twofold\[otel\]'"):
        Tracing("http://localhost:4318/v1/traces")


def test_an_endpoint_is_a_url() -> None:
    with pytest.raises(ConfigError, match="http://localhost:4318"):
        ServerConfig(otlp_traces_endpoint="localhost:4317")
