"""Checkpoints that AutoAWQ, llm-compressor, AutoFP8, Quark and transformers wrote, through the engine.

Weight-only ones must agree to float32 accuracy. Where activations are quantized, a difference in the last place can
move a value to the next code and a whole row of these random models with it, so rows are judged by their median and all
together by the share of equal top tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from real_checkpoints import (
    config_of,
    engine_logits,
    folders,
    reference,
    relative_error,
    row_errors,
    with_logits,
)
from stored_tensors import StoredTensors
from torch import Tensor
from torch.nn import Module
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

ALL = with_logits(folders("autoawq-*", "autofp8-*", "llmcompressor*", "quark-*", "transformers-*"))

pytestmark = pytest.mark.skipif(not ALL, reason="no ../shared/checkpoints beside the repository")


@pytest.mark.parametrize("folder", ALL, ids=lambda path: path.name)
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


UNJUDGED = sorted({*folders("autofp8-*-llama-tied")} - {*ALL})


@pytest.mark.parametrize("folder", UNJUDGED, ids=lambda path: path.name)
def test_without_stored_logits(folder: Path, tmp_path: Path) -> None:
    """The judge is transformers' model with weights and inputs read and rounded here, as AutoFP8 defines them."""
    tensors = StoredTensors.from_folder(folder).tensors
    model = base_model(folder, tensors, tmp_path)
    for name, module in model.named_modules():
        if f"{name}.weight_scale" in tensors:
            module.weight.data = tensors[f"{name}.weight"].float() * tensors[f"{name}.weight_scale"].float()
            module.register_forward_pre_hook(rounding_hook(tensors.get(f"{name}.input_scale")))
    ids = torch.arange(3, 40)
    with torch.inference_mode():
        expected = model(ids[None]).logits[0]
    logits = engine_logits(folder, ids[None])[0]
    assert row_errors(logits, expected).median().item() < 1e-3
    assert (logits.argmax(-1) == expected.argmax(-1)).float().mean().item() > 0.9


def base_model(folder: Path, tensors: dict[str, Tensor], work: Path) -> PreTrainedModel:
    """The folder's model in float32 with its plain tensors."""
    raw = {name: value for name, value in config_of(folder).items() if name != "quantization_config"}
    (work / "config.json").write_text(json.dumps(raw))
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(work), attn_implementation="eager").float()
    plain = {name: tensor for name, tensor in tensors.items() if tensor.dtype is torch.bfloat16}
    model.load_state_dict(plain, strict=False)
    return model


def rounding_hook(static: Tensor | None) -> Callable[[Module, tuple[Tensor, ...]], tuple[Tensor]]:
    def hook(module: Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
        x = inputs[0]
        scale = x.abs().amax(-1, keepdim=True) / 448 if static is None else static.float()
        return ((x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale,)

    return hook
