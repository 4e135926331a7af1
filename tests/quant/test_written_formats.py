"""Whole models in every written format: what stays plain is said, side files come along, and the engine reads it."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from twofold import LLM
from twofold.errors import CheckpointError, ConfigError
from twofold.quant import QuantizeSpec, quantize_model
from twofold.quant.calibration import CalibrationSpec

TinyModel = Callable[..., Path]
FEW = CalibrationSpec(num_sequences=8, length=32)
# What marks a quantized module, by format.
MARKS = ("qweight", "weight_packed", "weight_scale", "weight_scale_inv")
SPECS = {
    "gptq": QuantizeSpec(group_size=64, symmetric=True),
    "gptq_v2": QuantizeSpec(group_size=64),
    "awq": QuantizeSpec(group_size=64, format="awq"),
    "packed": QuantizeSpec(group_size=64, format="compressed-tensors"),
    "packed-8": QuantizeSpec(bits=8, group_size=64, symmetric=True, format="compressed-tensors"),
    "fp8-channel": QuantizeSpec(method="fp8"),
    "fp8-block": QuantizeSpec(method="fp8", variant="block"),
    "fp8-block-packed": QuantizeSpec(method="fp8", variant="block", format="compressed-tensors"),
}


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def is_listed(module: str, quantization: dict[str, Any]) -> bool:
    """Whether a config leaves a module plain, by each format's own words."""
    method = quantization["quant_method"]
    if method == "gptq":
        rules = quantization.get("dynamic", {})
        return any(key.startswith("-:") and re.match(key[2:], module) for key in rules)
    if method == "awq":
        return any(part in module for part in quantization["modules_to_not_convert"] or [])
    if method == "compressed-tensors":
        return module in quantization["ignore"]
    return module in (quantization.get("modules_to_not_convert") or quantization["ignored_layers"])


def check_truth(folder: Path, source: Path) -> list[str]:
    """B112: every linear of the decoder is quantized, or plain and listed; returns those listed."""
    tensors, quantization = stored(folder), config_of(folder)["quantization_config"]
    listed = []
    for name in stored(source):
        module = name.removesuffix(".weight")
        if ".layers." not in name or not name.endswith(("_proj.weight", "gate.weight")):
            continue
        marked = any(f"{module}.{mark}" in tensors for mark in MARKS)
        assert marked != is_listed(module, quantization), module
        if not marked:
            assert f"{module}.weight" in tensors
            listed.append(module)
    return listed


@functools.cache
def serves(folder: Path) -> torch.Tensor:
    with LLM(str(folder), device="cpu", dtype="float32") as llm:
        logits = llm.logits(list(range(3, 40)))
    assert bool(logits.isfinite().all())
    return logits


@pytest.mark.parametrize("name", SPECS)
def test_layers_that_do_not_fit_stay_plain_and_are_listed(tiny_model: TinyModel, tmp_path: Path, name: str) -> None:
    """B108: 192 features go into groups of 64, but not into blocks of 128; 96 go into neither."""
    is_block = "block" in name
    sizes = {"hidden_size": 128, "intermediate_size": 192 if is_block else 96}
    source = tiny_model("llama", **sizes)
    report = quantize_model(str(source), SPECS[name], tmp_path / "out")
    listed = check_truth(tmp_path / "out", source)
    for module in listed:
        weight = stored(source)[f"{module}.weight"].half()
        assert torch.equal(stored(tmp_path / "out")[f"{module}.weight"], weight)
    plain = {module.rpartition(".")[2] for module in listed}
    expected = {"down_proj"} if "fp8" not in name else set()
    assert plain == ({"down_proj", "up_proj", "gate_proj", "k_proj", "v_proj"} if is_block else expected)
    assert {module.rpartition(".")[2] for module, _ in report.plain} == plain
    original = serves(source)
    assert float((serves(tmp_path / "out") - original).norm() / original.norm()) < 0.6


@pytest.mark.parametrize("name", ["fp8-block", "awq"])
def test_nothing_fits(tiny_model: TinyModel, tmp_path: Path, name: str) -> None:
    source = tiny_model("llama", hidden_size=80, num_attention_heads=5, num_key_value_heads=1, intermediate_size=80)
    with pytest.raises(ConfigError, match=r"nothing to quantize: model\.layers\.0\..*not divisible by"):
        quantize_model(str(source), SPECS[name], tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["gptq_v2", "awq", "packed", "fp8-channel", "fp8-block"])
def test_side_files(tiny_model: TinyModel, tmp_path: Path, name: str) -> None:
    """B109, for each format: all but weights and config.json byte for byte, no config of another tool left over."""
    source = tmp_path / "source"
    source.mkdir()
    for path in tiny_model("llama", hidden_size=128, intermediate_size=128).iterdir():
        (source / path.name).write_bytes(path.read_bytes())
    for extra in ("special_tokens_map.json", "added_tokens.json", "modeling_x.py", "README.md"):
        (source / extra).write_text("{}")
    quantize_model(str(source), SPECS[name], tmp_path / "out")
    kept = {path.name for path in source.iterdir()}
    made = {path.name for path in (tmp_path / "out").iterdir()}
    assert made == kept | ({"quantize_config.json"} if name == "gptq_v2" else set())
    for file in kept - {"model.safetensors", "config.json"}:
        assert (tmp_path / "out" / file).read_bytes() == (source / file).read_bytes(), file
    before, after = config_of(source), config_of(tmp_path / "out")
    changed = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
    assert changed == {"quantization_config", "dtype"}


@pytest.mark.parametrize(
    "spec",
    [
        QuantizeSpec(method="gptq"),
        QuantizeSpec(method="awq"),
        QuantizeSpec(method="awq", format="compressed-tensors"),
        QuantizeSpec(method="fp8", variant="static"),
    ],
    ids=lambda spec: f"{spec}-{spec.format}",
)
def test_idle_experts(tiny_model: TinyModel, tmp_path: Path, spec: QuantizeSpec) -> None:
    """B111: experts 3 and 4 are never chosen; they are stored like their siblings, all finite, and said."""
    source = tmp_path / "source"
    source.mkdir()
    for path in tiny_model("mixtral").iterdir():
        (source / path.name).write_bytes(path.read_bytes())
    tensors = stored(source)
    # Feature 0 is large and positive in every token; routers turn it against experts 3 and 4.
    tensors["model.embed_tokens.weight"][:, 0] = 30.0
    for name in tensors:
        if name.endswith("gate.weight"):
            tensors[name][:, 0] = 0.0
            tensors[name][3:, 0] = -10.0
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    report = quantize_model(str(source), spec, tmp_path / "out", calibration=FEW)
    result = stored(tmp_path / "out")
    parts: dict[str, set[str]] = {}
    for name, tensor in result.items():
        if match := re.search(r"experts\.(\d)\.(w\d\..*)$", name):
            parts.setdefault(match[1], set()).add(match[2])
        if tensor.is_floating_point():
            assert bool(tensor.float().isfinite().all()), name
        if name.endswith("input_scale"):
            assert float(tensor) > 0, name
    assert len(parts) == 5 and len(set(map(frozenset, parts.values()))) == 1
    check_truth(tmp_path / "out", source)
    serves(tmp_path / "out")
    for layer in (0, 1):
        for expert in (3, 4):
            name = f"layers.{layer}.block_sparse_moe.experts.{expert}.w2"
            assert any(name in note and "no calibration token reached it" in note for note in report.notes), name


@pytest.mark.parametrize("name", ["gptq_v2", "awq", "packed", "fp8-channel"])
def test_a_result_that_is_not_finite_is_not_written(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """B112: a fault in one layer ends the run; nothing is left that a loader could take for a model."""
    from twofold.quant.methods import nearest, rounding

    calls: list[int] = []

    def faulty(weight: torch.Tensor, scheme: Any, power: Any) -> Any:
        result = nearest.quantize_nearest(weight, scheme)
        calls.append(1)
        if len(calls) == 9:
            result.scales[0] = torch.nan
        return result

    original = rounding.RoundedLayers.__init__
    monkeypatch.setattr(
        rounding.RoundedLayers, "__init__", lambda self, read, _, powers: original(self, read, faulty, powers)
    )
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\..*scale.* came out with NaN or infinity"):
        quantize_model(str(tiny_model("llama")), SPECS[name], tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_scales_of_the_kv_cache(tiny_model: TinyModel, tmp_path: Path) -> None:
    """Stored where readers look for them, said in the config, and used where the cache is asked for."""
    spec = QuantizeSpec(symmetric=True, kv_cache="fp8")
    quantize_model(str(tiny_model("llama")), spec, tmp_path / "out", calibration=FEW)
    scheme = config_of(tmp_path / "out")["quantization_config"]["kv_cache_scheme"]
    assert (scheme["type"], scheme["num_bits"], scheme["strategy"], scheme["dynamic"]) == ("float", 8, "tensor", False)
    tensors = stored(tmp_path / "out")
    for layer in range(2):
        for side in ("k", "v"):
            scale = tensors[f"model.layers.{layer}.self_attn.{side}_scale"]
            assert scale.shape == (1,) and 0 < float(scale) < 1
    with LLM(str(tmp_path / "out"), device="cpu", dtype="float32", kv_cache_dtype="fp8") as llm:
        assert bool(llm.logits(list(range(3, 40))).isfinite().all())
