"""The cache of quantized models: made once, found again by content, shared by processes."""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from twofold.errors import ConfigError
from twofold.kernels.cpu.library import unavailable
from twofold.quant import QuantizeSpec, ensure, ensure_quantized
from twofold.quant.calibration import CalibrationSpec
from twofold.quant.manifest import MANIFEST
from twofold.storage import StorageError

TinyModel = Callable[..., Path]
# A process that stops for good when two layers are done.
SCRIPT = """
import sys, time
from twofold.quant import ensure_quantized, progress
class Lines(progress._Lines):
    def __call__(self, done, total):
        if done == 2:
            print("two", flush=True)
            time.sleep(600)
progress._Lines = Lines
ensure_quantized(*sys.argv[1:])
"""


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """A fresh cache, and a list that grows with each real run of the quantizer."""
    unavailable()  # The kernels are not compiled into the fresh cache.
    monkeypatch.setenv("TWOFOLD_CACHE", str(tmp_path / "cache"))
    made: list[str] = []
    original = ensure.quantize_model

    def counted(*args: object, **options: object) -> object:
        made.append(str(args[1]))
        return original(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(ensure, "quantize_model", counted)
    return made


def test_made_once_per_spec(tiny_model: TinyModel, tmp_path: Path, runs: list[str]) -> None:
    model = str(tiny_model("llama"))
    first = ensure_quantized(model, "rtn:4:32")
    assert ensure_quantized(model, "rtn:4:32") == first
    assert first.parent == tmp_path / "cache" / "quantized"
    other = ensure_quantized(model, "rtn:8:32")
    assert other != first and runs == ["rtn:4:32", "rtn:8:32"]


def test_the_key_is_the_content_not_the_place(tiny_model: TinyModel, tmp_path: Path, runs: list[str]) -> None:
    first, second = tmp_path / "a" / "model", tmp_path / "b" / "model"
    for folder in (first, second):
        shutil.copytree(tiny_model("llama"), folder)
    assert ensure_quantized(str(first), "rtn:4:32") == ensure_quantized(str(second), "rtn:4:32")
    tensors = load_file(second / "model.safetensors")
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, second / "model.safetensors")
    assert ensure_quantized(str(first), "rtn:4:32") != ensure_quantized(str(second), "rtn:4:32")
    assert len(runs) == 2


def test_calibration_and_format_are_part_of_the_key(tiny_model: TinyModel, tmp_path: Path, runs: list[str]) -> None:
    model = str(tiny_model("llama"))
    (tmp_path / "a.txt").write_text("some words to look at\n" * 40)
    (tmp_path / "b.txt").write_text("some words to look at\n" * 40)
    few = CalibrationSpec(source=tmp_path / "a.txt", num_sequences=2, length=16)
    spec = QuantizeSpec(method="gptq", symmetric=True)
    first = ensure_quantized(model, spec, few)
    assert ensure_quantized(model, spec, replace(few, source=tmp_path / "b.txt", memory=1)) == first
    assert ensure_quantized(model, spec, replace(few, seed=1)) != first
    (tmp_path / "b.txt").write_text("other words to look at\n" * 40)
    assert ensure_quantized(model, spec, replace(few, source=tmp_path / "b.txt")) != first
    assert ensure_quantized(model, replace(spec, format="gptq"), few).name != first.name
    packed = ensure_quantized(model, replace(spec, format="compressed-tensors"), few)
    assert "pack-quantized" in (packed / "config.json").read_text() and len(runs) == 5
    rounded = ensure_quantized(model, "rtn:8:32")
    assert ensure_quantized(model, "rtn:8:32", few) == rounded  # rtn looks at no text


def test_a_format_that_cannot_hold_it_is_refused_first(runs: list[str]) -> None:
    with pytest.raises(ConfigError, match="format awq cannot hold rtn w8g32 asym"):
        ensure_quantized("/there/is/no/such/model", QuantizeSpec(bits=8, format="awq"))
    assert runs == []


def test_two_at_once_make_one(tiny_model: TinyModel, runs: list[str]) -> None:
    model = str(tiny_model("llama"))
    with ThreadPoolExecutor(2) as pool:
        folders = list(pool.map(lambda _: ensure_quantized(model, "rtn:4:32"), range(2)))
    assert folders[0] == folders[1] and len(runs) == 1


def _cut(path: Path) -> None:
    with path.open("r+b") as stream:
        stream.truncate(100)


@pytest.mark.parametrize(
    ("name", "harm", "said"),
    [
        ("model.safetensors", _cut, "model.safetensors has 100 bytes, not"),
        ("model.safetensors", Path.unlink, "model.safetensors is missing"),
        ("config.json", Path.unlink, "config.json is missing"),
        (MANIFEST, Path.unlink, f"{MANIFEST}, which lists its files, is missing or broken"),
        (MANIFEST, _cut, f"{MANIFEST}, which lists its files, is missing or broken"),
        (".", shutil.rmtree, None),
    ],
)
def test_a_damaged_entry_is_made_anew(
    name: str,
    harm: Callable[[Path], None],
    said: str | None,
    tiny_model: TinyModel,
    runs: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """By one of two that find it so."""
    model = str(tiny_model("llama"))
    folder = ensure_quantized(model, "rtn:4:32")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    harm(folder / name)
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda _: ensure_quantized(model, "rtn:4:32"), range(2))) == [folder] * 2
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert len(runs) == 2 and (said is None or f"is damaged: {said}" in caplog.text)


def test_who_waits_goes_on_behind_one_that_dies(
    tiny_model: TinyModel,
    tmp_path: Path,
    runs: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = str(tiny_model("llama", num_hidden_layers=3))
    expected = load_file(ensure_quantized(model, "rtn:4:32") / "model.safetensors")
    monkeypatch.setenv("TWOFOLD_CACHE", str(tmp_path / "other"))
    first = subprocess.Popen([sys.executable, "-c", SCRIPT, model, "rtn:4:32"], stdout=subprocess.PIPE, text=True)
    try:
        assert first.stdout is not None and first.stdout.readline() == "two\n"
        with ThreadPoolExecutor(1) as pool, caplog.at_level(logging.INFO):
            second = pool.submit(ensure_quantized, model, "rtn:4:32")
            while "waiting for another process" not in caplog.text:
                assert not second.done()
            first.kill()
            folder = second.result(120)
    finally:
        first.kill()
        first.wait()
    assert "an interrupted run finished 2 of 3 layers" in caplog.text
    written = load_file(folder / "model.safetensors")
    assert written.keys() == expected.keys()
    assert all(bool((written[name] == expected[name]).all()) for name in expected)


def test_a_wrong_spec_touches_nothing(tiny_model: TinyModel, tmp_path: Path, runs: list[str]) -> None:
    with pytest.raises(ConfigError, match="'awk'"):
        ensure_quantized(str(tiny_model("llama")), "awk:4:32")
    assert not (tmp_path / "cache").exists()


def test_a_cache_that_cannot_be_written(tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", Path("/proc/twofold")):
        monkeypatch.setenv("TWOFOLD_CACHE", str(place))
        with pytest.raises(StorageError, match="cannot be written; set TWOFOLD_CACHE"):
            ensure_quantized(str(tiny_model("llama")), "rtn:4:32")
