"""``twofold plan``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from twofold import cli


def test_table(tiny_model: Callable[..., Path], capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["plan", str(tiny_model("llama")), "--arch", "gfx942", "--memory", "192GiB"]) == 0
    text = capsys.readouterr().out
    for words in (
        "gfx942, 192.00 GiB",
        "as stored",
        "int8",
        "int4",
        "fp8",
        "per token",
        "triton (native)",
        "512",
        "KV cache fp8",
        "float8_e4m3fnuz",
    ):
        assert words in text


def test_json(tiny_model: Callable[..., Path], capsys: pytest.CaptureFixture) -> None:
    options = ["--arch", "sm_90", "--memory", "1G", "--json", "--lengths", "100", "200", "--dtype", "float16"]
    assert cli.main(["plan", str(tiny_model("qwen3")), *options, "--quantization", "int4"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["dtype"] == "float16" and plan["free_bytes"] == 1 << 30
    assert [row["kv_cache_dtype"] for row in plan["plans"]] == ["auto", "bfloat16", "fp8", "int8"]
    for row in plan["plans"]:
        assert row["quantization"] == "int4" and set(row["requests"]) == {"100", "200"}
        assert row["requests"]["100"] > row["requests"]["200"] > 0
    plain, other_halves, *others = (row["kv_tokens"] for row in plan["plans"])
    assert plain == other_halves
    assert all(plain < tokens < 2 * plain for tokens in others)  # 32 features and a scale against 32 halves
    assert (
        cli.main(["plan", str(tiny_model("qwen3")), *options, "--quantization", "int4", "--kv-cache-dtype", "int8"])
        == 0
    )
    assert [row["kv_dtype"] for row in json.loads(capsys.readouterr().out)["plans"]] == ["int8"]


def test_what_does_not_fit_and_what_is_not_served(
    tiny_model: Callable[..., Path], capsys: pytest.CaptureFixture
) -> None:
    assert cli.main(["plan", str(tiny_model("llama")), "--device", "cpu", "--memory", "1M"]) == 1
    assert "does not fit" in capsys.readouterr().out
    assert cli.main(["plan", str(tiny_model("llama")), "--arch", "sm_80", "--memory", "1G", "--strict-kernels"]) == 0
    text = capsys.readouterr().out
    assert "--strict-kernels" in text  # that chip has no fp8
    assert {line.split()[-4] for line in text.splitlines() if line.endswith("not served here")} == {"fp8"}
    assert cli.main(["plan", str(tiny_model("llama")), "--arch", "gfx942"]) == 2
    assert "--memory" in capsys.readouterr().err


def test_an_architecture_that_does_not_exist_comes_before_all_else(
    tiny_model: Callable[..., Path], capsys: pytest.CaptureFixture
) -> None:
    for arch, closest in (("gfx9999", "gfx950"), ("gfx943", "gfx942"), ("sm_95", "sm_90")):
        assert cli.main(["plan", str(tiny_model("llama")), "--arch", arch]) == 2
        text = capsys.readouterr().err
        assert f"there is no GPU architecture '{arch}'" in text and closest in text and "--memory" not in text
