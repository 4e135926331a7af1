"""Degenerate weights and calibration texts: handled and reported, never written silently (B106, B107, B112)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from quantized_models import logits
from safetensors.torch import load_file, save_file
from twofold.errors import CheckpointError
from twofold.quant import quantize_model
from twofold.quant.calibration import CalibrationSpec

TinyModel = Callable[..., Path]
SPECS = ["rtn:4:32", "gptq:4:32", "awq:4:32", "smoothquant", "fp8:static", "auto:5"]
ONE_WINDOW = CalibrationSpec(num_sequences=1, length=32)
NAME = "model.layers.1.mlp.up_proj.weight"


def changed(source: Path, folder: Path, change: Callable[[torch.Tensor], None]) -> Path:
    """A copy with one matrix changed in place."""
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors[NAME])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def degenerate(weight: torch.Tensor) -> None:
    """A column and a group of zeros, a constant group, a zero row, and one huge weight."""
    weight[:, 3] = 0
    weight[0, :32] = 0
    weight[1, 32:64] = 0.25
    weight[2] = 0
    weight[5, 7] = 300.0


@pytest.mark.parametrize("spec", SPECS)
def test_degenerate_weights(tiny_model: TinyModel, tmp_path: Path, spec: str) -> None:
    source = changed(tiny_model("llama"), tmp_path / "source", degenerate)
    report = quantize_model(str(source), spec, tmp_path / "out", calibration=ONE_WINDOW)
    assert all(error.relative_rms < 0.6 for error in report.errors)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert all(bool(tensor.float().isfinite().all()) for tensor in stored.values() if tensor.is_floating_point())
    assert bool(logits(tmp_path / "out", [1, 2, 3, 4]).isfinite().all())


@pytest.mark.parametrize("spec", SPECS)
def test_a_weight_that_is_nan(tiny_model: TinyModel, tmp_path: Path, spec: str) -> None:
    source = changed(tiny_model("llama"), tmp_path / "source", lambda weight: weight[5].fill_(float("nan")))
    with pytest.raises(CheckpointError, match="NaN or infinity"):
        quantize_model(str(source), spec, tmp_path / "out", calibration=ONE_WINDOW)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("spec", ["gptq:4:32", "awq:4:32", "smoothquant", "fp8:static", "auto:5"])
@pytest.mark.parametrize(("text", "length"), [("a" * 600, 32), ("ab", 2)])
def test_texts_of_one_token(tiny_model: TinyModel, tmp_path: Path, spec: str, text: str, length: int) -> None:
    (tmp_path / "text.txt").write_text(text)
    few = CalibrationSpec(source=tmp_path / "text.txt", num_sequences=4, length=length)
    report = quantize_model(str(tiny_model("llama")), spec, tmp_path / "out", calibration=few)
    assert all(error.relative_rms < 0.6 for error in report.errors)
    assert bool(logits(tmp_path / "out", [1, 2, 3, 4]).isfinite().all())
    short = [note for note in report.notes if "4 were asked for" in note]
    assert len(short) == (length == 2) and str(report.calibration).startswith("1 x 2" if short else "4 x 32")


def test_a_linear_layer_is_quantized_or_listed(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B112: a layer whose rounding fails ends the run; nothing is left that says otherwise."""
    from twofold.quant.methods import gptq_layers

    original = gptq_layers.quantize_gptq
    calls: list[int] = []

    def fail(*arguments: object) -> object:
        calls.append(1)
        if len(calls) == 3:
            raise ValueError("injected")
        return original(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(gptq_layers, "quantize_gptq", fail)
    with pytest.raises(CheckpointError, match=r"mlp\.gate_proj: injected"):
        quantize_model(str(tiny_model("llama")), "gptq:4:32", tmp_path / "out", calibration=ONE_WINDOW)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(gptq_layers, "quantize_gptq", original)
    quantize_model(str(tiny_model("llama")), "gptq:4:64", tmp_path / "out", calibration=ONE_WINDOW)
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    listed = {key[3:-1].replace("\\", "") for key in config["dynamic"] if key.startswith("-:")}
    stored = load_file(tmp_path / "out" / "model.safetensors")
    for name in load_file(tiny_model("llama") / "model.safetensors"):
        if name.endswith("_proj.weight"):
            module = name.removesuffix(".weight")
            assert (f"{module}.qweight" in stored) != (module in listed)
