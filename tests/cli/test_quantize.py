"""``twofold quantize`` as a user types it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from gguf_files import write_gguf
from twofold.cli import main

TinyModel = Callable[..., Path]


def test_a_result_and_a_report(tiny_model: TinyModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, report = tmp_path / "out", tmp_path / "report.json"
    options = [
        "--method",
        "rtn",
        "--bits",
        "4",
        "--group-size",
        "32",
        "--output",
        str(out),
        "--json",
        str(report),
        "--no-card",
    ]
    assert main(["quantize", str(tiny_model("llama")), *options]) == 0
    printed = capsys.readouterr()
    lines = dict(line.split(maxsplit=1) for line in printed.out.splitlines())
    assert lines["scheme"] == "rtn w4g32 asym"
    assert (
        "14 quantized, 0 left plain" in printed.out and "bits per weight 5.125 over all linear layers, " in printed.out
    )
    assert "in the quantized ones" not in printed.out and "note" not in printed.out
    assert "worst layer     model.layers." in printed.out and "weight files" in printed.out
    figures = json.loads(report.read_text())
    assert figures["spec"] == "rtn:4:32" and len(figures["errors"]) == 14
    assert {path.name for path in out.iterdir()} >= {"model.safetensors", "config.json", "tokenizer.json"}


def test_plain_layers_are_in_the_report(
    tiny_model: TinyModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(
            ["quantize", str(tiny_model("llama")), "--group-size", "64", "--output", str(tmp_path / "out"), "--no-card"]
        )
        == 0
    )
    out = capsys.readouterr().out
    assert "12 quantized, 2 left plain" in out
    bits = re.search(r"bits per weight (\S+) over all linear layers, (\S+) in the quantized ones, (\S+) over the", out)
    assert bits is not None and float(bits[2]) < float(bits[1]) < 16 and float(bits[2]) < float(bits[3])
    assert "model.layers.1.mlp.down_proj: 96 input features are not divisible by the group size 64" in out


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--bits", "5", "--output", "x"], "choose from 2, 3, 4, 8"),
        (["--method", "rtm", "--output", "x"], "choose from rtn"),
        (["--group-size", "100", "--output", "x"], "choose from -1, 16, 32"),
        (["--max-shard-size", "big", "--output", "x"], "'big' is not a size"),
        ([], "--output"),
    ],
)
def test_wrong_options_are_named(options: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["quantize", "model", *options])
    assert stopped.value.code == 2
    assert text in capsys.readouterr().err


def test_a_used_folder_is_refused(tiny_model: TinyModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["quantize", str(tiny_model("llama")), "--output", str(tmp_path / "out")]
    assert main(arguments) == 0
    capsys.readouterr()
    assert main(arguments) == 2
    refused = capsys.readouterr().err
    assert "--overwrite" in refused and len(refused.splitlines()) == 1  # and no progress before it
    assert main([*arguments, "--overwrite", "--symmetric"]) == 0


def test_a_quantized_model_is_refused_without_progress(
    tiny_model: TinyModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["quantize", str(tiny_model("llama")), "--output", str(tmp_path / "once"), "--no-card"]) == 0
    assert "2/2 layers" in capsys.readouterr().err
    assert main(["quantize", str(tmp_path / "once"), "--output", str(tmp_path / "twice")]) == 2
    refused = capsys.readouterr().err
    assert "quantized already" in refused and len(refused.splitlines()) == 1


def test_a_result_larger_than_its_source(
    tiny_model: TinyModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_gguf(tiny_model("llama"), tmp_path / "small.gguf", "llama", quantization="Q4_0")
    assert main(["quantize", str(source), "--bits", "8", "--output", str(tmp_path / "out"), "--no-card"]) == 0
    assert "the result is larger than its source" in capsys.readouterr().out


def test_an_unknown_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quantize", str(tmp_path / "nothing"), "--output", str(tmp_path / "out")]) == 1
    assert "there is no file or folder" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
