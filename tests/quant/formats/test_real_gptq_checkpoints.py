"""Checkpoints that auto-gptq and GPTQModel wrote, through the engine, against logits computed outside this project."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from stored_tensors import SHARED, StoredTensors
from twofold import LLM
from twofold.quant.canonical import PackedWeight, dequantize
from twofold.quant.formats import detect_format, read_quantization

CHECKPOINTS = SHARED / "checkpoints"
# auto-gptq wrote zeros of -1 over whole words here, and its own reader does not wrap: no reading is right.
DAMAGED = {"autogptq-w4-g32-actorder-asym-llama-pos"}
FOLDERS = sorted(
    path
    for pattern in ("autogptq-*", "gptqmodel-gptq-*")
    for path in CHECKPOINTS.glob(pattern)
    if path.name not in DAMAGED
)

pytestmark = pytest.mark.skipif(not FOLDERS, reason="no ../shared/checkpoints beside the repository")


def dense_tensors(folder: Path) -> tuple[dict[str, torch.Tensor], list[str]]:
    """All tensors of a checkpoint with quantized modules made dense, and the names of those modules."""
    config = json.loads((folder / "config.json").read_text())
    source = StoredTensors.from_folder(folder)
    layout = detect_format(read_quantization(folder, config))
    modules = sorted(name.removesuffix(".qweight") for name in source.names if name.endswith(".qweight"))
    tensors = {name: tensor for name, tensor in source.tensors.items() if name.rpartition(".")[0] not in modules}
    for module in modules:
        weight = layout.load(source, module, torch.float32)
        assert isinstance(weight, PackedWeight)
        assert weight.scheme.bits == layout.scheme(module).bits  # type: ignore[union-attr]
        tensors[f"{module}.weight"] = dequantize(weight)
        bias = layout.load_bias(source, module, torch.float32)
        if bias is not None:
            tensors[f"{module}.bias"] = bias
    return tensors, modules


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_logits_of_the_engine(folder: Path) -> None:
    reference = load_file(folder / "reference.safetensors")
    with LLM(str(folder), device="cpu", dtype="float32") as llm:
        logits = torch.stack([llm.logits(ids) for ids in reference["input_ids"].tolist()])
    expected = reference["logits_weights_fp32"]
    assert ((logits - expected).norm() / expected.norm()).item() < 1e-4


@pytest.mark.parametrize("arch", ["llama-pos", "llama-tied"])
def test_versions_one_and_two_of_the_same_model_are_bit_identical(arch: str) -> None:
    asym = "asym-" if arch == "llama-pos" else ""
    first, _ = dense_tensors(CHECKPOINTS / f"gptqmodel-gptq-gptq-w4-g32-{asym}{arch}")
    second, _ = dense_tensors(CHECKPOINTS / f"gptqmodel-gptq-gptq_v2-w4-g32-{asym}{arch}")
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_head_with_its_own_width() -> None:
    folder = CHECKPOINTS / "gptqmodel-gptq-gptq-w4-g32-lmhead-llama-untied"
    config = json.loads((folder / "config.json").read_text())
    layout = detect_format(read_quantization(folder, config))
    assert str(layout.scheme("lm_head")) == "w8g32 sym"
    assert str(layout.scheme("model.layers.0.mlp.up_proj")) == "w4g32 sym"


def test_dynamic_rules_of_a_real_config() -> None:
    folder = CHECKPOINTS / "gptqmodel-gptq-gptq-w4-g32-dynamic-llama-untied"
    config = json.loads((folder / "config.json").read_text())
    layout = detect_format(read_quantization(folder, config))
    source = StoredTensors.from_folder(folder)
    assert str(layout.scheme("model.layers.0.self_attn.o_proj")) == "dense"
    assert str(layout.load(source, "model.layers.0.self_attn.o_proj", torch.float32).scheme) == "dense"
    assert str(layout.load(source, "model.layers.1.self_attn.o_proj", torch.float32).scheme) == "w4g32 sym"
    assert str(layout.load(source, "model.layers.1.mlp.down_proj", torch.float32).scheme) == "w8g32 sym"
