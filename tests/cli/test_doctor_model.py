"""``twofold doctor MODEL``: the engine's own kernel report, before anything is loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from twofold import LLM, cli

TinyModel = Callable[..., Path]


def doctor(capsys: pytest.CaptureFixture, *arguments: str) -> tuple[int, dict]:
    code = cli.main(["doctor", "--json", *arguments])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("options", [(), ("--quantization", "int4")])
def test_rows_are_the_engines(tiny_model: TinyModel, capsys: pytest.CaptureFixture, options: tuple[str, ...]) -> None:
    path = str(tiny_model("qwen3"))
    code, report = doctor(capsys, path, "--device", "cpu", *options)
    with LLM(path, device="cpu", quantization=options[1] if options else None) as llm:
        rows = llm.info.kernels
    assert code == 0 and report["problems"] == [] and report["kernels"] == rows
    layers = {row["layer"]: row for row in rows if "layer" in row}
    assert list(layers) == [
        "self_attn.q_proj+k_proj+v_proj",
        "self_attn.o_proj",
        "mlp.gate_proj+up_proj",
        "mlp.down_proj",
        "lm_head",
    ]
    assert {row["count"] for row in layers.values()} == {"2", "1"}
    assert layers["mlp.down_proj"]["scheme"] == ("w4g32 asym" if options else "dense")


def test_an_option_that_changes_nothing_is_named(tiny_model: TinyModel, capsys: pytest.CaptureFixture) -> None:
    arguments = ["doctor", str(tiny_model("llama")), "--device", "cpu", "--cpu-activations", "int8"]
    assert cli.main(arguments) == 0
    assert "note: cpu_activations 'int8' changes nothing here: it needs" in capsys.readouterr().out
    assert cli.main([*arguments, "--quantization", "int4"]) == 0
    text = capsys.readouterr().out
    assert "c_int8_activations" in text and "changes nothing" not in text


def test_another_device(tiny_model: TinyModel, capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["doctor", str(tiny_model("llama")), "--arch", "gfx942", "--quantization", "fp8"]) == 0
    text = capsys.readouterr().out
    layer = "mlp.down_proj x2 (64x96 fp8 channel"
    for words in ("gfx942 in bfloat16", layer, "triton_fp8_weights, native", "not triton:"):
        assert words in text


def test_strict(tiny_model: TinyModel, capsys: pytest.CaptureFixture) -> None:
    path = str(tiny_model("llama"))
    for arch in ("gfx942", "gfx1201", "sm_80", "sm_90"):
        assert doctor(capsys, path, "--arch", arch, "--strict-kernels")[0] == 0
        code, report = doctor(capsys, path, "--arch", arch, "--strict-kernels", "--dtype", "float32")
        assert code == 0 and all(row["quality"] == "native" for row in report["kernels"])
    code, report = doctor(capsys, path, "--arch", "sm_70", "--strict-kernels")
    assert code == 1 and "--strict-kernels" in report["problems"][0] and "bfloat16" in report["problems"][0]


def test_wrong_use(tiny_model: TinyModel, capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["doctor", "--arch", "gfx942"]) == 2
    assert "MODEL" in capsys.readouterr().err
