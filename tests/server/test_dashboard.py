"""The dashboard asks for metrics that exist, and vLLM's names are the same figures."""

from __future__ import annotations

import json
import re
from pathlib import Path

import twofold
from http_server import RunningServer
from prometheus_client.parser import text_string_to_metric_families
from twofold.server.metrics import with_vllm_names

DASHBOARD = json.loads((Path(twofold.__file__).parent / "docs" / "grafana.json").read_text())


def test_the_dashboards_metrics_exist(counting: RunningServer) -> None:
    counting.complete("a", max_tokens=3, ignore_eos=True)
    text = counting.http.get("/metrics").text
    expressions = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    names = set(re.findall(r"twofold_\w+", " ".join(expressions)))
    assert len(names) >= 13
    samples = {sample.name for family in text_string_to_metric_families(text) for sample in family.samples}
    assert names <= samples
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)


def test_vllms_names(counting: RunningServer) -> None:
    text = counting.http.get("/metrics", params={"names": "vllm"}).text
    assert "twofold_" not in text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    for name in ("num_requests_running", "time_to_first_token_seconds", "request_success", "prompt_tokens"):
        family = families[f"vllm:{name}"]
        assert all(sample.labels["model_name"] == counting.model for sample in family.samples)
    assert any(name.startswith("process_") for name in families), "others keep their names"


def test_labels_are_escaped() -> None:
    text = with_vllm_names('# HELP twofold_a b\n# TYPE twofold_a gauge\ntwofold_a 1.0\ntwofold_b{x="y"} 2.0\n', 'm"\\n')
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    assert [(sample.name, sample.labels, sample.value) for sample in samples] == [
        ("vllm:a", {"model_name": 'm"\\n'}, 1.0),
        ("vllm:b", {"model_name": 'm"\\n', "x": "y"}, 2.0),
    ]
