"""Perplexity and divergence against transformers' own logits in float64."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from twofold.cli import main
from twofold.engine.config import EngineConfig
from twofold.engine.sources import resolve_model
from twofold.engine.tokenizer import load_tokenizer
from twofold.errors import ConfigError
from twofold.quant import quantize_model
from twofold.quant.calibration.texts import EVALUATION_SAMPLE, sample_path, text_windows
from twofold.quant.evaluation import EvaluationSpec, evaluate

TinyModel = Callable[..., Path]
SPEC = EvaluationSpec(num_windows=3, length=40)


def config(model: Path) -> EngineConfig:
    return EngineConfig(model=str(model), device="cpu", dtype="float32")


def scores(model: Path, windows: torch.Tensor) -> torch.Tensor:
    judge = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    with torch.inference_mode():
        return judge(windows).logits.log_softmax(-1)


def test_figures_agree_with_transformers(tiny_model: TinyModel, tmp_path: Path) -> None:
    model, other = tiny_model("llama"), tiny_model("llama-tied")
    every = text_windows(load_tokenizer(resolve_model(str(model))), sample_path(EVALUATION_SAMPLE), 40)
    windows = every[torch.tensor([0, (len(every) - 1) / 2, len(every) - 1]).round().long()]
    ours, theirs = scores(model, windows), scores(other, windows)
    loss = -ours[:, :-1].gather(2, windows[:, 1:, None]).mean()
    reference_loss = -theirs[:, :-1].gather(2, windows[:, 1:, None]).mean()
    figures = evaluate(config(model), SPEC, reference=config(other))
    assert figures.num_tokens == 3 * 39
    assert figures.perplexity == pytest.approx(math.exp(loss), rel=1e-4)
    assert figures.reference_perplexity == pytest.approx(math.exp(reference_loss), rel=1e-3)
    assert figures.divergence == pytest.approx(float((theirs.exp() * (theirs - ours)).sum(-1).mean()), rel=1e-3)
    assert figures.same_top == pytest.approx(float((theirs.argmax(-1) == ours.argmax(-1)).double().mean()), abs=0.01)


def test_a_model_does_not_stray_from_itself(tiny_model: TinyModel) -> None:
    figures = evaluate(config(tiny_model("llama")), SPEC, reference=config(tiny_model("llama")))
    assert figures.divergence == pytest.approx(0.0, abs=1e-4) and figures.same_top == 1.0
    assert figures.perplexity == pytest.approx(figures.reference_perplexity, rel=1e-3)


def test_command(tiny_model: TinyModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tiny_model("llama")
    quantize_model(str(source), "rtn:8:32", tmp_path / "out")
    options = ["--reference", str(source), "--windows", "2", "--length", "32", "--device", "cpu"]
    assert main(["eval", str(tmp_path / "out"), *options, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["num_tokens"] == 62 and 0 < figures["divergence"] < 0.01
    assert main(["eval", str(source), "--windows", "2", "--length", "32", "--device", "cpu"]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["tokens"] == "62" and float(lines["perplexity"]) > 1 and "divergence" not in lines


def test_what_cannot_be_compared_is_said(tiny_model: TinyModel, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="another vocabulary"):
        other = tiny_model("llama", vocab_size=336)
        evaluate(config(tiny_model("llama")), SPEC, reference=config(other))
    with pytest.raises(ConfigError, match="does not exist"):
        EvaluationSpec(source=tmp_path / "none.txt")
    (tmp_path / "short.txt").write_text("short")
    with pytest.raises(ConfigError, match="less than one window"):
        evaluate(config(tiny_model("llama")), EvaluationSpec(source=tmp_path / "short.txt"))
