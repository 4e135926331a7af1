"""What cannot work is refused before the first weight is read: by ``quantize``, and by ``eval``."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from twofold.cli import main
from twofold.engine.weights.safetensors_dir import SafetensorsCheckpoint
from twofold.errors import ConfigError, StorageError
from twofold.quant import ensure, ensure_quantized, quantize_model

TinyModel = Callable[..., Path]
FILES = {
    "empty.txt": b"",
    "binary.txt": bytes(range(256)) * 40,
    "zeros.txt": bytes(4000),
    "short.txt": b"hello there",
    "broken.jsonl": b'{"text": "a"}\n{nope\n',
    "array.json": b'[\n {"text": "a"}\n]\n',
    "other.jsonl": b'{"words": "a"}\n',
    "no-content.jsonl": b'{"messages": [{"role": "user"}]}\n',
}
# Options -> a part of the one line that refuses them.
OPTIONS = {
    "--method gptq --calibration empty.txt": "holds 0 tokens, less than one window of 512; give more text",
    "--method gptq --calibration binary.txt": "as UTF-8 text",
    "--method gptq --calibration zeros.txt": "is no text: it holds bytes of zero",
    "--method awq --calibration short.txt": "holds 11 tokens, less than one window",
    "--method gptq --calibration broken.jsonl": "broken.jsonl line 2 is not JSON",
    "--method gptq --calibration array.json": "write one JSON object a line",
    "--method gptq --calibration other.jsonl": "line 1 has neither text, prompt nor messages",
    "--method gptq --calibration no-content.jsonl": "messages[0].content",
    "--method gptq --calibration folder": "is a folder; give one text or .jsonl file",
    "--method gptq --calibration nothing.txt": "does not exist",
    "--calibration short.txt": "is for methods that look at text",
    "--method fp8 --calibration-seed 1": "--calibration-seed is for methods that look at text",
    "--method gptq --calibration-sequences 0": "0 sequences; at least 1 is needed",
    "--method gptq --calibration-length 1": "sequences of 1 tokens; at least 2 are needed",
    "--method gptq --calibration-length 4096": "sequences of 4096 tokens; this model has positions for 512",
    "--max-shard-size 0G": "hold nothing; allow some GB",
    "--max-shard-size 5": "add a unit, as in 5G",
    "--json folder": "is a folder; name a file",
    "--json nowhere/report.json": "cannot be written",
    "--method auto": "target bits go with the method auto",
    "--json out": "is or lies in the output",
    "--json out/report.json": "is or lies in the output",
    "--json MODEL/config.json": "is or lies in the model",
    "--method gptq --calibration short.txt --json short.txt": "is or lies in the calibration",
    "--method gptq --calibration /dev/null": "is no ordinary file; give a text",
    "--method gptq --calibration full/text.txt --overwrite --output full": "lies in the output full",
    "--method auto --target-bits 9": "out of range; it must be from 2.5 to 8.25",
    "--method auto --target-bits nan": "must be from 2.5 to 8.25",
    "--method auto --target-bits four": "'four' is not a number",
    "--method auto --target-bits \u0664": "is not a number",
    "--bits 5": "choose from 2, 3, 4, 8",
    "--bits 4.0": "'4.0' is not a whole number",
    "--group-size 0": "choose from -1, 16, 32",
    "--method GPTQ": "choose from rtn, gptq",
    "--method gptq --calibration-memory -1G": "it is below 0; write one such as 4G",
    "--max-shard-size -1G": "it is below 0; write one such as 4G",
    "--kv-cache int4": "choose from fp8, int8",
    "--method auto --target-bits 2.5": "take at least",
    "--target-bits 4": "--target-bits is for auto",
    "--method awq --bits 3 --format awq": "formats that can: gptq_v2, compressed-tensors",
    "--method gptq --bits 8 --format awq": "formats that can",
    "--format fp8": "fp8 files hold e4m3 weights",
    "--format gptq": "cannot store a zero point of 0",
    "--method fp8 --format gptq": "GPTQ files hold integer weights",
    "--method fp8 --format fp8": "fp8 files have one scale per matrix, or square blocks",
    "--method smoothquant --format gptq_v2": "formats that can: compressed-tensors",
    "--method auto --target-bits 5 --format awq": "same bits and group size",
    "--method gptq --order full --format compressed-tensors": "or another --order",
    "--kv-cache fp8 --format gptq_v2": "no place for scales of an fp8 KV cache",
    "--method fp8 --variant block": "not divisible by blocks of 128 x 128",
    "--group-size 128": "sizes that fit: -1, 16, 32",
    "--method awq --group-size 1024": "sizes that fit: -1, 16, 32",
}


@pytest.fixture(autouse=True)
def unreadable(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor of any checkpoint can be read, and no file of weights be hashed: an attempt fails the test."""

    def refuse(*_: object) -> object:
        raise AssertionError("a weight was read")

    for name in ("_read", "rows", "mapped"):
        monkeypatch.setattr(SafetensorsCheckpoint, name, refuse)
    monkeypatch.setattr("twofold.quant.pipeline.content_key", refuse)
    monkeypatch.setattr(ensure, "content_key", refuse)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, data in FILES.items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "folder").mkdir()
    (tmp_path / "full").mkdir()
    for name in ("config.json", "text.txt"):
        (tmp_path / "full" / name).write_text("{}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TWOFOLD_CACHE", str(tmp_path / "cache"))
    return tmp_path


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line on the error stream; argparse adds a second one."""
    capsys.readouterr()
    try:
        code = main([*words])
    except SystemExit as stop:
        code = stop.code  # type: ignore[assignment]
    said = capsys.readouterr()
    assert code == 2, said
    lines = said.err.strip().splitlines()
    assert said.out == "" and len(lines) == (2 if "Try `" in said.err else 1)
    return lines[0]


@pytest.mark.parametrize("options", OPTIONS)
def test_options(options: str, tiny_model: TinyModel, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(place.iterdir())
    model = str(tiny_model("llama"))
    line = refused(capsys, "quantize", model, "--output", "out", *options.replace("MODEL", model).split())
    assert line.startswith("twofold quantize: ") and OPTIONS[options] in line
    assert sorted(place.iterdir()) == before


@pytest.mark.parametrize(
    ("output", "said"),
    [
        ("", "the path is empty"),
        ("~nobody-has-this-name/x", "names a home that is not known"),
        ("short.txt", "is a file"),
        ("short.txt/x", "below a file"),
        ("/proc/out", "/proc cannot be written"),
        ("model", "is or contains the model itself"),
        ("model/inside", "lies inside the model"),
        (".", "is or contains the model itself"),
        ("full", "is not empty"),
    ],
)
def test_outputs(
    output: str, said: str, tiny_model: TinyModel, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(tiny_model("llama"), "model")
    (place / "full" / "mine").write_text("")
    assert said in refused(capsys, "quantize", "model", "--output", output)
    assert not list(place.rglob(".*partial"))


def test_models(tiny_model: TinyModel, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "gemma2 models cannot be rotated" in refused(
        capsys, "quantize", str(tiny_model("gemma2")), "--output", "out", "--rotate"
    )
    shutil.copytree(tiny_model("llama"), "once")
    config = json.loads(Path("once/config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    Path("once/config.json").write_text(json.dumps(config))
    assert "quantized already; give the original" in refused(capsys, "quantize", "once", "--output", "out")
    shutil.copytree(tiny_model("llama"), "cut")
    (place / "cut" / "model.safetensors").rename("cut/model-00001-of-00002.safetensors")
    names = {"model.norm.weight": "model-00002-of-00002.safetensors"}
    Path("cut/model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    assert main(["quantize", "cut", "--output", "out"]) == 1
    assert "model-00002-of-00002.safetensors" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--text short.txt", "less than one window"),
        ("--text binary.txt", "as UTF-8 text"),
        ("--text broken.jsonl", "line 2 is not JSON"),
        ("--text folder", "is a folder"),
        ("--text nothing.txt", "does not exist"),
        ("--length 1", "at least 1 of 2 tokens"),
        ("--windows 0", "at least 1"),
        ("--quantize awq:5:32", "bits 5 is not one of"),
        ("--quantize int8", "--quantization int8"),
        ("--quantize rtn:4:128", "sizes that fit: -1, 16, 32"),
    ],
)
def test_eval(options: str, said: str, tiny_model: TinyModel, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert said in refused(capsys, "eval", str(tiny_model("llama")), "--device", "cpu", *options.split())


def test_another_vocabulary(tiny_model: TinyModel, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models = [str(tiny_model("llama")), "--reference", str(tiny_model("llama", vocab_size=336))]
    assert "another vocabulary or tokenizer" in refused(capsys, "eval", *models, "--device", "cpu")


@pytest.mark.parametrize(
    ("spec", "said"), [("rtn:4:128", "sizes that fit"), ("fp8:block", "blocks of 128"), ("auto:2.5", "at least")]
)
def test_serving_quantized(spec: str, said: str, tiny_model: TinyModel, place: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        ensure_quantized(str(tiny_model("llama")), spec)
    assert not (place / "cache").exists()


def test_a_full_disk(tiny_model: TinyModel, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    with pytest.raises(StorageError, match="free; free some space, or choose a folder on another disk"):
        quantize_model(str(tiny_model("llama")), "rtn:4:32", place / "out")
