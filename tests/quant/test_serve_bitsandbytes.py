"""Whole models as bitsandbytes stores them, through the engine: transformers judges, the values are by definition."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from paged_runner import load, logits_of
from safetensors.torch import load_file, save_file
from tiny_models import judge, judge_logits
from torch import Tensor

TOKENS = [5, 80, 255, 7, 7, 31, 199, 4]
BLOCK = 64
# The quantiles of a normal distribution that the NF4 paper lists.
NF4 = torch.tensor([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
])  # fmt: skip


def nf4(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    blocks = weight.flatten().unflatten(0, (-1, BLOCK))
    absmax = blocks.abs().amax(1)
    codes = (blocks / absmax[:, None])[..., None].sub(NF4).abs().argmin(-1)
    flat = codes.flatten()
    state = {"quant_type": "nf4", "blocksize": BLOCK, "dtype": "float32", "shape": list(weight.shape)}
    stored = {
        name: (flat[0::2] * 16 + flat[1::2]).to(torch.uint8)[:, None],
        f"{name}.absmax": absmax,
        f"{name}.quant_map": NF4.clone(),
        f"{name}.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }
    return stored, (NF4[codes] * absmax[:, None]).view(weight.shape)


def int8(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    largest = weight.abs().amax(1)
    codes = (weight / largest[:, None] * 127).round().to(torch.int8)
    stored = {
        name: codes,
        name.removesuffix("weight") + "SCB": largest,
        name.removesuffix("weight") + "weight_format": torch.tensor(0, dtype=torch.uint8),
    }
    return stored, codes.float() * largest[:, None] / 127


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize(("encode", "option"), [(nf4, "load_in_4bit"), (int8, "load_in_8bit")])
def test_logits(
    family: str,
    encode: Callable[[str, Tensor], tuple[dict[str, Tensor], Tensor]],
    option: str,
    tiny_model: Callable[..., Path],
    tmp_path: Path,
) -> None:
    quantized, plain = tmp_path / "quantized", tmp_path / "plain"
    for folder in (quantized, plain):
        shutil.copytree(tiny_model(family), folder)
    tensors: dict[str, Any] = load_file(plain / "model.safetensors")
    stored = dict(tensors)
    for name, tensor in list(tensors.items()):
        if "_proj.weight" in name:
            del stored[name]
            parts, tensors[name] = encode(name, tensor)
            stored |= parts
    save_file(stored, quantized / "model.safetensors")
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((quantized / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", option: True}
    (quantized / "config.json").write_text(json.dumps(config))
    expected, original = (judge_logits(judge(folder), TOKENS) for folder in (plain, tiny_model(family)))
    found = logits_of(load(quantized), TOKENS)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert (expected - original).abs().max() > 0.01, "rounding must be visible"
