"""``gptq`` on tiny models: what is written, how far its outputs are, and going on after an interruption."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from quantized_models import FEW, divergence
from safetensors.torch import load_file
from twofold.errors import ConfigError
from twofold.quant import QuantizeSpec, quantize_model
from twofold.quant.calibration import CalibrationSpec

TinyModel = Callable[..., Path]


@pytest.mark.parametrize("order", ["static", "full"])
def test_outputs_are_closer_than_rounded_ones(tiny_model: TinyModel, tmp_path: Path, order: str) -> None:
    source = tiny_model("llama")
    spec = QuantizeSpec(method="gptq", bits=3, group_size=32, order=order)
    report = quantize_model(str(source), spec, tmp_path / "gptq", calibration=FEW)
    quantize_model(str(source), "rtn:3:32", tmp_path / "rtn")
    assert divergence(tmp_path / "gptq", source) < divergence(tmp_path / "rtn", source)
    assert all(error.output_error is not None and error.output_error < error.relative_rms for error in report.errors)


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "mixtral", "qwen3-moe"])
def test_families(tiny_model: TinyModel, tmp_path: Path, family: str) -> None:
    source = tiny_model(family)
    report = quantize_model(str(source), "gptq:8:-1", tmp_path / "out", calibration=FEW)
    assert report.errors and all(module.endswith(".gate") for module, _ in report.plain)
    # A token whose experts are nearly tied may go to others.
    assert divergence(tmp_path / "out", source) < 3e-2


class Stop(BaseException):
    """As Ctrl-C does."""


@pytest.mark.parametrize("spec", ["gptq:4:32", "awq:4:32"])
def test_an_interrupted_work_goes_on(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: str
) -> None:
    source = tiny_model("llama", num_hidden_layers=3)
    quantize_model(str(source), spec, tmp_path / "whole", calibration=FEW)

    def stop(done: int, total: int) -> None:
        if done == 2:
            raise Stop

    with pytest.raises(Stop):
        quantize_model(str(source), spec, tmp_path / "out", stop, calibration=FEW)
    assert not (tmp_path / "out").exists()
    quantized: list[int] = []
    from twofold.quant.methods.calibrated import CalibratedLayers

    original = CalibratedLayers.quantize
    monkeypatch.setattr(
        CalibratedLayers, "quantize", lambda self, plan: (quantized.append(plan.number), original(self, plan))[1]
    )
    report = quantize_model(str(source), spec, tmp_path / "out", calibration=FEW)
    assert quantized == [2] and len(report.errors) == 21
    assert {path.name for path in tmp_path.iterdir()} == {"out", "whole"}
    whole, out = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "out"))
    assert whole.keys() == out.keys() and all(torch.equal(whole[name], out[name]) for name in whole)


def test_another_work_does_not_go_on(tiny_model: TinyModel, tmp_path: Path) -> None:
    source = tiny_model("llama")

    def stop(done: int, total: int) -> None:
        if done == 1:
            raise Stop

    with pytest.raises(Stop):
        quantize_model(str(source), "gptq:4:32", tmp_path / "out", stop, calibration=FEW)
    seen: list[int] = []
    quantize_model(str(source), "rtn:4:32", tmp_path / "out", lambda done, total: seen.append(done))
    assert seen == [0, 0, 1, 2]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_too_little_text_is_an_error_before_any_work(tiny_model: TinyModel, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("a few words")
    with pytest.raises(ConfigError, match="less than one window of 512; give more text"):
        quantize_model(
            str(tiny_model("llama")),
            "gptq:4:32",
            tmp_path / "out",
            calibration=CalibrationSpec(source=tmp_path / "short.txt"),
        )
    assert [path.name for path in tmp_path.iterdir()] == ["short.txt"]
