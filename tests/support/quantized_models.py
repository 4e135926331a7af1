"""What tests of quantization methods share: little calibration text, layers of tiny models, distances of logits."""

from __future__ import annotations

from pathlib import Path

import torch
from twofold import LLM
from twofold.engine.sources import resolve_model
from twofold.engine.tokenizer import load_tokenizer
from twofold.engine.weights import open_checkpoint
from twofold.quant.calibration import CalibrationSpec
from twofold.quant.calibration.block_model import BlockModel
from twofold.quant.calibration.texts import EVALUATION_SAMPLE, calibration_windows, sample_path, text_windows

FEW = CalibrationSpec(num_sequences=16, length=32)


def first_layer(source: Path, index: int = 0) -> tuple[BlockModel, torch.Tensor]:
    """A model by layers, and what its layer ``index`` reads for a few windows: [8, 32, K]."""
    files = resolve_model(str(source))
    model = BlockModel(files, open_checkpoint(files))
    windows = calibration_windows(load_tokenizer(files), CalibrationSpec(num_sequences=8, length=32))
    hidden = model.embed(windows)
    for number in range(index):
        hidden = model.run(number, model.load_layer(number), hidden)
    return model, hidden


def logits(model: Path, ids: list[int]) -> torch.Tensor:
    """float32 [T, V] of one sequence."""
    with LLM(str(model), device="cpu", dtype="float32") as llm:
        return llm.logits(ids)


def divergence(model: Path, source: Path) -> float:
    """Nats a token from ``source``, on text that was not calibrated on."""
    tokenizer = load_tokenizer(resolve_model(str(source)))
    ids = text_windows(tokenizer, sample_path(EVALUATION_SAMPLE), 128)[3].tolist()
    original, quantized = logits(source, ids).log_softmax(-1), logits(model, ids).log_softmax(-1)
    return float((original.exp() * (original - quantized)).sum(-1).mean())
