"""Gemma 3 models that read images: their text model is served, the rest is left on the disk."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from paged_runner import load, logits_of
from safetensors.torch import load_file, save_file
from tiny_models import BASE, FAMILIES
from twofold.engine.text_config import text_config

TOKENS = [(11 * i * i + 5) % 256 for i in range(60)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor]:
    """The folder of a small one, and its logits."""
    folder = tmp_path_factory.mktemp("gemma3")
    vision = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    config = transformers.Gemma3Config(
        text_config={**BASE, **FAMILIES["gemma3"][1]},
        vision_config=vision,
        image_token_index=319,
        boi_token_index=318,
        eoi_token_index=317,
        mm_tokens_per_image=4,
    )
    torch.manual_seed(0)
    model = transformers.Gemma3ForConditionalGeneration(config).float().eval()
    model.save_pretrained(folder)
    with torch.inference_mode():
        return folder, model(torch.tensor([TOKENS])).logits[0]


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_logits(whole: tuple[Path, torch.Tensor], tmp_path: Path, prefix: str) -> None:
    folder, expected = whole
    tensors = load_file(folder / "model.safetensors")
    assert any(name.startswith("vision_tower.") for name in tensors)
    shutil.copytree(folder, tmp_path / "model")
    renamed = {name.replace("language_model.model.", prefix): tensor for name, tensor in tensors.items()}
    save_file(renamed, tmp_path / "model" / "model.safetensors")
    torch.testing.assert_close(logits_of(load(tmp_path / "model"), TOKENS), expected, atol=1e-4, rtol=0)


def test_what_the_hubs_configs_leave_out(whole: tuple[Path, torch.Tensor]) -> None:
    """transformers' own text config of a config with few keys (google/gemma-3-4b-it's)."""
    raw = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "eos_token_id": [1, 106],
        "text_config": {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34},
    }
    ours, theirs = text_config(raw), transformers.Gemma3TextConfig(**raw["text_config"]).to_dict()
    assert ours.pop("architectures") == ["Gemma3ForCausalLM"] and ours.pop("eos_token_id") == [1, 106]
    assert {key: theirs[key] for key in ours} == ours
    plain = json.loads((whole[0] / "config.json").read_text())["text_config"]
    assert text_config(plain) is plain
