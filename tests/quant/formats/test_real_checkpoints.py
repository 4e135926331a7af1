"""Checkpoints that AutoAWQ, llm-compressor, AutoFP8, Quark and transformers wrote, through the engine.

Weight-only ones must agree to float32 accuracy. Where activations are quantized, a difference in the last place can
move a value to the next code and a whole row of these random models with it, so rows are judged by their median and all
together by the share of equal top tokens.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from real_checkpoints import (
    engine_logits,
    folders,
    is_served,
    linear_modules,
    reference,
    relative_error,
    row_errors,
    transformers_logits,
    with_logits,
)

ALL = with_logits(folders("autoawq-*", "autofp8-*", "llmcompressor*", "quark-*", "transformers-*"))
SERVED = [path for path in ALL if is_served(path)]
# Families that the engine does not have: their weights are judged inside transformers' model.
OTHERS = [path for path in ALL if not is_served(path)]

pytestmark = pytest.mark.skipif(not ALL, reason="no ../shared/checkpoints beside the repository")


@pytest.mark.parametrize("folder", SERVED, ids=lambda path: path.name)
def test_logits_of_the_engine(folder: Path) -> None:
    stored = reference(folder)
    logits = engine_logits(folder, stored["input_ids"])
    if "logits_weights_acts" not in stored:
        assert relative_error(logits, stored["logits_weights_fp32"]) < 1e-4
        return
    expected = stored["logits_weights_acts"]
    errors = row_errors(logits, expected)
    assert errors.median().item() < 0.02
    assert (logits.argmax(-1) == expected.argmax(-1)).float().mean().item() > 0.9
    # Not merely the weights: quantizing the input is a larger step than what is left.
    assert errors.median() < row_errors(logits, stored["logits_weights_fp32"]).median() / 2


@pytest.mark.parametrize("folder", OTHERS, ids=lambda path: path.name)
def test_weights_in_another_engine(folder: Path, tmp_path: Path) -> None:
    stored = reference(folder)
    logits = transformers_logits(folder, linear_modules(folder), tmp_path, stored["input_ids"])
    assert relative_error(logits, stored["logits_weights_fp32"]) < 1e-4
