"""``twofold serve`` from the command line: options, and a real model from start to stop."""

from __future__ import annotations

import dataclasses
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import openai
import pytest
from twofold.cli import build_parser
from twofold.cli.engine_options import engine_config
from twofold.cli.serve import server_config
from twofold.server.config import ServerConfig


def parse(*words: str) -> object:
    return build_parser("serve").parse_args(["serve", *words])


def test_defaults_are_the_dataclass_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TWOFOLD_API_KEY", raising=False)
    assert server_config(parse("m")) == ServerConfig()


def test_every_field_has_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {
        "--host": "::1",
        "--port": "9",
        "--api-key": "k",
        "--generation-config": "none",
        "--grace-seconds": "1.5",
        "--max-body-bytes": "1M",
        "--max-open-requests": "7",
        "--max-connections": "9",
        "--body-seconds": "2",
        "--request-seconds": "60",
        "--api-key-file": "keys.json",
        "--cors-origin": "*",
        "--tls-certfile": "cert.pem",
        "--tls-keyfile": "key.pem",
        "--tool-parser": "hermes",
        "--reasoning-parser": "think",
        "--reranker": "qwen3",
        "--state-dir": "state",
        "--otlp-traces-endpoint": "http://localhost:4318/v1/traces",
        "--quantize": "rtn:4:32",
        "--max-num-seqs": "3",
    }
    words = [word for pair in options.items() for word in pair]
    args = parse("m", *words, "--access-log", "--served-model-name", "a", "--served-model-name", "b")
    config = server_config(args)
    assert config == ServerConfig(
        host="::1",
        port=9,
        served_model_names=("a", "b"),
        api_keys=("k",),
        generation_config="none",
        grace_seconds=1.5,
        max_body_bytes=1 << 20,
        max_open_requests=7,
        max_connections=9,
        body_seconds=2.0,
        request_seconds=60.0,
        api_key_file="keys.json",
        cors_origins=("*",),
        tls_certfile="cert.pem",
        tls_keyfile="key.pem",
        tool_parser="hermes",
        reasoning_parser="think",
        reranker="qwen3",
        state_dir="state",
        otlp_traces_endpoint="http://localhost:4318/v1/traces",
        access_log=True,
    )
    changed = [f.name for f in dataclasses.fields(config) if getattr(config, f.name) == getattr(ServerConfig(), f.name)]
    assert changed == []
    assert engine_config(args).quantize == "rtn:4:32" and engine_config(args).max_num_seqs == 3


def test_keys_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOFOLD_API_KEY", "one,two")
    assert server_config(parse("m")).api_keys == ("one", "two")
    assert server_config(parse("m", "--api-key", "three")).api_keys == ("three",)


def start(*words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "twofold", "serve", *words, "--port", "0", "--num-threads", "1"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd="/")


def test_serves_and_says_how_to_ask(tiny_model: Callable[..., Path]) -> None:
    process = start(str(tiny_model("llama")), "--served-model-name", "it's")
    try:
        assert process.stdout is not None
        lines = []
        while not any("chat.completions.create" in line for line in lines):
            line = process.stdout.readline()
            assert line, process.communicate()[1]
            lines.append(line)
        shown = "".join(lines)
        url = re.search(r"http://127\.0\.0\.1:\d+", shown)
        assert url is not None
        assert httpx.get(f"{url.group()}/health").status_code == 200
        client = openai.OpenAI(base_url=f"{url.group()}/v1", api_key="none", max_retries=0)
        assert client.models.list().data[0].id == "it's"
        # The lines shown must work as they are.
        for start_of_line in ("curl ", "python "):
            line = next(line.strip() for line in lines if line.strip().startswith(start_of_line))
            line = line.replace("python ", f"{sys.executable} ", 1)
            done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=60)
            assert done.returncode == 0 and done.stdout and "error" not in done.stdout, (line, done)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    finally:
        process.kill()


@pytest.mark.parametrize(("model", "code"), [("/no/such/folder", 1), ("", 1)])
def test_unknown_model_is_one_line(model: str, code: int) -> None:
    process = start(model)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code and "Traceback" not in errors
    assert errors.strip().splitlines()[-1].startswith("twofold serve: ")
