"""Rotation: orthogonal matrices, and models that compute what they computed before."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from quantized_models import FEW, divergence, logits
from tiny_models import judge, judge_logits
from twofold.engine.model_config import raw_config
from twofold.engine.sources import resolve_model
from twofold.engine.weights import open_checkpoint
from twofold.errors import ConfigError
from twofold.quant import parse_quantize_spec, quantize_model
from twofold.quant.rotation import HEAD, RotatedCheckpoint, hadamard_matrix, rotation_matrix

TinyModel = Callable[..., Path]
IDS = list(range(40, 90))


@pytest.mark.parametrize("size", [1, 2, 8, 12, 20, 24, 28, 36, 64, 96, 576, 896])
def test_hadamard_matrices(size: int) -> None:
    """12, 20, 24 by Paley's first construction, 28 and 36 by his second, the rest by doubling."""
    matrix = hadamard_matrix(size)
    assert matrix is not None and matrix.abs().eq(1).all()
    assert torch.equal(matrix @ matrix.T, size * torch.eye(size, dtype=torch.float64))


@pytest.mark.parametrize("size", [15, 92, 576])
def test_rotations_are_orthogonal(size: int) -> None:
    matrix = rotation_matrix(size)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(size, dtype=torch.float64))
    assert not torch.equal(rotation_matrix(size, seed=1), matrix)


def rotated(source: Path) -> RotatedCheckpoint:
    files = resolve_model(str(source))
    return RotatedCheckpoint(open_checkpoint(files), raw_config(files))


@pytest.mark.parametrize("family", ["llama", "llama-tied", "llama-bias", "qwen2", "qwen3", "phi3"])
def test_the_function_stays(tiny_model: TinyModel, family: str) -> None:
    """transformers' model filled with the turned tensors, head untied."""
    source = tiny_model(family)
    expected = judge_logits(judge(source), IDS)
    checkpoint = rotated(source)
    config = transformers.AutoConfig.from_pretrained(source, tie_word_embeddings=False)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    model.load_state_dict({name: checkpoint.get(name).float() for name in checkpoint.names})
    torch.testing.assert_close(judge_logits(model, IDS), expected, rtol=1e-3, atol=1e-3)
    original = open_checkpoint(resolve_model(str(source)))
    for name in ("model.embed_tokens.weight", "model.layers.0.mlp.down_proj.weight", HEAD):
        assert name not in original.names or not torch.allclose(checkpoint.get(name), original.get(name))


@pytest.mark.parametrize("family", ["llama-tied", "mixtral", "qwen2-moe"])
def test_quantized_models(tiny_model: TinyModel, tmp_path: Path, family: str) -> None:
    """At 8 bits: what differs is rounding; routers and shared experts turned too, the head stored apart."""
    source = tiny_model(family)
    spec = dataclasses.replace(parse_quantize_spec("rtn:8:16"), rotate=True)
    report = quantize_model(str(source), spec, tmp_path / "out")
    assert divergence(tmp_path / "out", source) < 0.03
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    was_tied = json.loads((source / "config.json").read_text())["tie_word_embeddings"]
    assert was_tied == any("head" in note for note in report.notes)


def test_with_calibration(tiny_model: TinyModel, tmp_path: Path) -> None:
    """A tied model through a method that runs it, and its logits."""
    source = tiny_model("llama-tied")
    spec = dataclasses.replace(parse_quantize_spec("gptq:8:16"), rotate=True)
    quantize_model(str(source), spec, tmp_path / "out", calibration=FEW)
    assert divergence(tmp_path / "out", source) < 0.01
    assert logits(tmp_path / "out", IDS).isfinite().all()


@pytest.mark.parametrize("family", ["gemma", "gemma2"])
def test_families_that_cannot(tiny_model: TinyModel, tmp_path: Path, family: str) -> None:
    spec = dataclasses.replace(parse_quantize_spec("rtn:4:32"), rotate=True)
    with pytest.raises(ConfigError, match=f"{family} models cannot be rotated; llama"):
        quantize_model(str(tiny_model(family)), spec, tmp_path / "out")
    assert not (tmp_path / "out").exists()
