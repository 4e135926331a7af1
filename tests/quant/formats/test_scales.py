"""Scales that no quantizer means are errors that name the layer, not tokens that mean nothing."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from real_checkpoints import CHECKPOINTS
from safetensors.torch import load_file, save_file
from twofold import LLM
from twofold.errors import CheckpointError

MODULE = "model.layers.0.mlp.down_proj"
CASES = [
    ("llmcompressor-fp8-static-qwen2", "input_scale", 0.0, "the input scale is 0; it must be above 0"),
    ("llmcompressor-fp8-static-qwen2", "input_scale", -1.0, "the input scale is -1"),
    ("llmcompressor-fp8-static-qwen2", "weight_scale", float("nan"), "a weight scale is NaN or infinite"),
    ("autogptq-w4-g32-llama-tied", "scales", float("inf"), "a weight scale is NaN or infinite"),
    ("llmcompressor-nvfp4-mistral", "weight_global_scale", 0.0, "global scale is 0"),
]

pytestmark = pytest.mark.skipif(not CHECKPOINTS.is_dir(), reason="no ../shared/checkpoints beside the repository")


@pytest.mark.parametrize(("name", "part", "value", "message"), CASES)
def test_damaged_scales(name: str, part: str, value: float, message: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(CHECKPOINTS / name, folder, copy_function=shutil.copyfile)
    for path in folder.iterdir():
        path.chmod(0o644)
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        if f"{MODULE}.{part}" in tensors:
            tensors[f"{MODULE}.{part}"].view(-1)[0] = value
            save_file(tensors, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=message) as caught:
        LLM(str(folder), device="cpu", dtype="float32")
    assert "down_proj" in str(caught.value)


def test_what_tools_write_passes() -> None:
    """Negative scales and scales of 0 are legal: a group may be turned round, or be all zero."""
    from twofold.quant.canonical import PackedWeight
    from twofold.quant.formats.base import _check_scales
    from twofold.quant.packing import pack
    from twofold.quant.scheme import WeightOnly

    scales = torch.tensor([[-0.5, 0.0]])
    _check_scales(PackedWeight(WeightOnly(4, 32), (1, 64), pack(torch.zeros(1, 64, dtype=torch.uint8), 4), scales), "m")
