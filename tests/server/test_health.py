"""/health, /metrics, /v1/kernels and the phases of a server."""

from __future__ import annotations

import httpx
import pytest
from http_server import RunningServer, counting_server
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient
from twofold.server.app import create_app
from twofold.server.config import ServerConfig
from twofold.server.state import default_name


def samples(server: RunningServer) -> dict[str, float]:
    """Metric samples by name, with the label values behind it."""
    text = server.http.get("/metrics").text
    return {
        "".join([sample.name, *(f":{value}" for value in sample.labels.values())]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_health(counting: RunningServer) -> None:
    for method in ("GET", "HEAD"):
        response = counting.http.request(method, "/health")
        assert response.status_code == 200
    assert counting.http.get("/health").json() == {"status": "ready"}


def test_before_the_model_is_loaded() -> None:
    with TestClient(create_app(None, ServerConfig())) as client:
        for method, path in (
            ("GET", "/health"),
            ("GET", "/v1/models"),
            ("POST", "/v1/completions"),
            ("POST", "/tokenize"),
        ):
            response = client.request(method, path, json={} if method == "POST" else None)
            assert response.status_code == 503 and response.headers["retry-after"]
            assert response.json()["error"]["type"] == "server_error"
        assert client.get("/metrics").status_code == 200
        assert client.get("/nowhere").status_code == 404


def test_metrics_count_what_happened() -> None:
    with counting_server() as server:
        server.complete("abc", max_tokens=4, n=2)
        server.chat("a", max_tokens=2)
        server.events("/v1/completions", {"prompt": "a", "max_tokens": 3, "stop": "c"})
        server.post("/v1/completions", {})
        server.http.get("/nowhere")
        server.wait_idle()
        found = samples(server)
    assert found["twofold_engine_up"] == 1 and found["twofold_num_requests_running"] == 0
    assert found["twofold_request_success_total:length"] == 3 and found["twofold_request_success_total:stop"] == 1
    assert found["twofold_time_to_first_token_seconds_count"] == 3
    assert found["twofold_e2e_request_latency_seconds_count"] == 3
    assert found["twofold_request_prompt_tokens_sum"] == 3 + len("user:a;") + 1
    assert found["twofold_request_generation_tokens_sum"] == 8 + 2 + 2
    assert found["twofold_http_requests_total:create_completion:200"] == 2
    assert found["twofold_http_requests_total:create_completion:400"] == 1
    assert found["twofold_http_requests_total:none:404"] == 1
    assert found["twofold_num_open_http_requests"] == 0
    assert found["process_resident_memory_bytes"] > 0


def test_metrics_of_the_real_engine(tiny: RunningServer) -> None:
    before = samples(tiny)
    prompt = [(3 * index + 1) % 256 for index in range(33)]
    for _ in range(2):
        tiny.complete(prompt, max_tokens=4, ignore_eos=True)
    tiny.wait_idle()
    after = samples(tiny)
    grown = {name: after[name] - before[name] for name in before}
    assert grown["twofold_generation_tokens_total"] == 8 and grown["twofold_prompt_tokens_total"] == 66
    assert grown["twofold_prefix_cache_queries_total"] == 66 and grown["twofold_prefix_cache_hits_total"] == 32
    assert after["twofold_kv_cache_usage_perc"] == 0 and after["twofold_kv_cache_blocks"] > 0


def test_kernels(tiny: RunningServer) -> None:
    report = tiny.http.get("/v1/kernels").json()
    assert report["device"] == "cpu" and report["dtype"] == "float32"
    assert report["kernels"] == tiny.client.info.kernels and report["kernels"]
    down = next(row for row in report["kernels"] if row.get("layer") == "mlp.down_proj")
    assert down["scheme"] == "dense" and int(down["bytes"]) > 0 and down["kernel"] and down["quality"]


@pytest.mark.parametrize(
    ("model", "name"), [("smollm2-135m-instruct", "smollm2-135m-instruct"), ("org/model-7B", "org/model-7B")]
)
def test_names_stay_what_users_typed(model: str, name: str) -> None:
    assert default_name(model) == name


def test_names_of_paths_show_no_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("my-model")
    file = folder / "weights.Q4_0.gguf"
    file.touch()
    assert default_name(str(folder)) == folder.name and default_name(f"{folder}/") == folder.name
    assert default_name(str(file)) == "weights.Q4_0"


def test_no_folder_of_the_host_in_models(tiny: RunningServer) -> None:
    text = tiny.http.get("/v1/models").text
    assert "/" not in httpx.Response(200, text=text).json()["data"][0]["id"] and "/tmp" not in text
