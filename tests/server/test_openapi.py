"""The OpenAPI document, and bodies drawn from it: none of them may end in a 5xx, whatever it holds."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from http_server import RunningServer, running_server
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schema_strategies import Strategies
from twofold.server.app import ROUTES
from twofold.server.openapi import document

DOCUMENT = document(ROUTES)
BODIES = {
    path: item["post"]["requestBody"]["content"]["application/json"]["schema"]
    for path, item in DOCUMENT["paths"].items()
    if "requestBody" in item.get("post", {})
}
MODEL = "fuzzed"


@pytest.fixture(scope="module")
def fuzzed(tiny_model: Callable[..., Path]) -> Iterator[RunningServer]:
    options: dict[str, Any] = {"max_model_len": 48, "max_num_batched_tokens": 16, "num_threads": 1}
    with running_server(tiny_model("llama"), server={"served_model_names": (MODEL,)}, **options) as server:
        yield server


def test_every_route_is_described(counting: RunningServer) -> None:
    served = counting.http.get("/openapi.json")
    assert served.status_code == 200 and served.json() == json.loads(json.dumps(DOCUMENT))
    for route in ROUTES:
        item = DOCUMENT["paths"][re.sub(r":\w+}", "}", route.path)]
        for method in (route.methods or set()) - {"HEAD"}:
            operation = item[method.lower()]
            assert operation["summary"] and operation["operationId"]
    without = {"/v1/responses/{response_id}/cancel", "/v1/files", "/v1/batches/{batch_id}/cancel"}
    posts = {path for path, item in DOCUMENT["paths"].items() if "post" in item}
    assert posts - set(BODIES) <= without
    ids = [operation["operationId"] for item in DOCUMENT["paths"].values() for operation in item.values()]
    assert len(set(ids)) == len(ids)


def test_references_lead_somewhere() -> None:
    references = set(re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(DOCUMENT)))
    assert references <= set(DOCUMENT["components"]["schemas"]) and len(references) > 20
    assert "twofold." not in json.dumps(sorted(references)), "names without modules"
    for schema in DOCUMENT["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a", "logprobs": 1}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "logprobs": True}),
        ("/v1/responses", {"input": "a", "max_output_tokens": 3}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3}),
        ("/v1/embeddings", {"input": ["a", "b"]}),
    ],
)
def test_answers_are_as_described(fuzzed: RunningServer, path: str, body: dict[str, Any]) -> None:
    answer = fuzzed.post(path, {"model": MODEL, **body})
    assert answer.status_code == 200, answer.text
    described = DOCUMENT["paths"][path]["post"]["responses"]["200"]["content"]["application/json"]["schema"]
    jsonschema.validate(answer.json(), {**described, "components": DOCUMENT["components"]})
    for part in (body, {"model": 5, **body}):
        schema = {**BODIES[path], "components": DOCUMENT["components"]}
        assert jsonschema.Draft202012Validator(schema).is_valid({"model": MODEL, **part}) == (part is body)


def check(server: RunningServer, path: str, body: Any) -> int:
    """The status. No 5xx, neither as a status nor inside a stream, and an envelope around every refusal."""
    response = server.http.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
    assert response.status_code < 500, response.text
    if response.status_code == 200:
        for line in response.text.splitlines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                error = event.get("error") or event.get("response", {}).get("error") or {}
                assert error.get("code") not in ("internal_error", "server_error"), event
    else:
        assert response.json()["error"]["message"], response.text
    return response.status_code


def fuzz(server: RunningServer, examples: int) -> None:
    fixed: dict[str, st.SearchStrategy[Any]] = {
        "model": st.sampled_from([MODEL, MODEL, MODEL, MODEL, "", "other"]),
        "max_tokens": st.sampled_from([1, 2, 3, 0, -1]),
        "background": st.just(None),
    }
    strategies = Strategies(DOCUMENT, fixed)
    requests = st.one_of([st.tuples(st.just(path), strategies.body(schema)) for path, schema in BODIES.items()])

    statuses: Counter[int] = Counter()

    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), derandomize=examples < 500)
    @given(requests)
    def run(request: tuple[str, Any]) -> None:
        statuses[check(server, *request)] += 1

    run()
    assert statuses[200] and statuses[400], statuses
    server.wait_idle()
    answer = server.complete("a", max_tokens=1)
    assert answer["choices"]


def test_no_5xx(fuzzed: RunningServer) -> None:
    fuzz(fuzzed, 120)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_5xx_at_length(fuzzed: RunningServer) -> None:
    fuzz(fuzzed, 5000)
