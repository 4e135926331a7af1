"""fp8 and SmoothQuant: codes against their definition, calibrated scales against what they stand for, whole models."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from quantized_models import FEW, divergence, first_layer
from safetensors.torch import load_file
from torch import Tensor
from twofold.errors import ConfigError
from twofold.quant import parse_quantize_spec, quantize_model
from twofold.quant.canonical import dequantize
from twofold.quant.methods.gptq import GPTQOptions
from twofold.quant.methods.kv_ranges import KVRanges
from twofold.quant.methods.layer_method import LayerWeights
from twofold.quant.methods.scaling import scale_layer
from twofold.quant.methods.smoothquant import Int8Groups, search_smoothing
from twofold.quant.methods.statistics import InputStatistics
from twofold.quant.scheme import Activation, Element, Int8
from twofold.quant.spec import VARIANTS

TinyModel = Callable[..., Path]
INT8 = Int8((1, -1), Activation(Element.INT8))


@pytest.mark.parametrize("variant", VARIANTS)
def test_fp8_models(tiny_model: TinyModel, tmp_path: Path, variant: str) -> None:
    source = tiny_model("llama", hidden_size=128, intermediate_size=256, head_dim=64, initializer_range=0.1)
    report = quantize_model(str(source), f"fp8:{variant}", tmp_path / "out", calibration=FEW)
    assert len(report.errors) == 14 and all(error.relative_rms < 0.04 for error in report.errors)
    assert divergence(tmp_path / "out", source) < 0.06
    scales = [
        t for name, t in load_file(tmp_path / "out" / "model.safetensors").items() if name.endswith("input_scale")
    ]
    assert len(scales) == (14 if variant == "static" else 0)


def test_static_input_scales_are_the_largest_inputs(tiny_model: TinyModel, tmp_path: Path) -> None:
    """Of the first norm, which no quantized layer comes before."""
    source = tiny_model("llama")
    quantize_model(str(source), "fp8:static", tmp_path / "out", calibration=dataclasses.replace(FEW, num_sequences=8))
    model, hidden = first_layer(source)
    with torch.inference_mode():
        largest = float(model.load_layer(0).input_layernorm(hidden).abs().max())
    written = load_file(tmp_path / "out" / "model.safetensors")
    for name in ("q_proj", "k_proj", "v_proj"):
        scale = float(written[f"model.layers.0.self_attn.{name}.input_scale"])
        assert scale == pytest.approx(largest / 448, rel=2e-3)


@pytest.mark.parametrize("spec", ["fp8:static", "gptq:4:32", "awq:4:32", "smoothquant"])
def test_idle_experts(tiny_model: TinyModel, tmp_path: Path, spec: str) -> None:
    """B111: experts that no token reaches are said, rounded to nearest, and share their siblings' input scales."""
    source = idle_experts(tiny_model("qwen3-moe", num_experts=6, num_experts_per_tok=2), tmp_path / "source")
    report = quantize_model(str(source), spec, tmp_path / "out", calibration=FEW)
    idle = {f"model.layers.1.mlp.experts.{e}.{part}_proj" for e in (4, 5) for part in ("gate", "up", "down")}
    named = {module for module in idle if any(note.startswith(module) for note in report.notes)}
    assert named == idle
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert all(t.float().isfinite().all() for t in written.values() if t.is_floating_point())
    assert {error.module for error in report.errors} >= idle
    if spec == "fp8:static":
        scales = {name: float(t) for name, t in written.items() if name.endswith("input_scale") and ".experts." in name}
        for part in ("gate_proj", "down_proj"):
            siblings = [scales[f"model.layers.1.mlp.experts.{e}.{part}.input_scale"] for e in range(6)]
            assert siblings[4] == siblings[5] == max(siblings[:4]) > 0


def idle_experts(source: Path, folder: Path) -> Path:
    """A copy whose routers never choose the last two experts."""
    import shutil

    from safetensors.torch import save_file

    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    router = tensors["model.layers.1.mlp.gate.weight"]
    # Two experts that always score above the mean of pairs that cancel: the last two equal minus and plus nothing.
    router[4:] = 0
    router[:2] = torch.randn(router.shape[1], generator=torch.Generator().manual_seed(0))
    router[1] = -router[0]
    router[3] = -router[2]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_smoothing_lowers_the_error_of_rounded_inputs(tiny_model: TinyModel) -> None:
    model, hidden = first_layer(tiny_model("llama"))

    def layer_with_loud_features() -> torch.nn.Module:
        layer = model.load_layer(0)
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            norm.weight.data[::17] *= 40
        return layer

    def rounded(values: Tensor) -> Tensor:
        scale = values.abs().amax(-1, keepdim=True) / 127
        return (values / scale).round() * scale

    def error(layer: torch.nn.Module, expected: Tensor) -> float:
        for module in layer.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight.data.copy_(rounded(module.weight.data))
                module.register_forward_pre_hook(lambda module, args: (rounded(args[0]),))
        return float((model.run(0, layer, hidden) - expected).norm())

    with torch.inference_mode():
        layer, plain = layer_with_loud_features(), layer_with_loud_features()
        expected = model.run(0, layer, hidden)
        schemes = {name: INT8 for name, module in layer.named_modules() if isinstance(module, torch.nn.Linear)}
        assert not scale_layer(layer, schemes, search_smoothing, lambda one: model.run(0, one, hidden))
        assert error(layer, expected) < 0.6 * error(plain, expected)


def test_int8_codes_are_gptqs() -> None:
    """Signed codes with positive scales, closer on the inputs than codes of the largest magnitude."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, 64, generator=generator) @ torch.randn(64, 64, generator=generator)
    weight = torch.randn(24, 64, generator=generator)
    statistics, result = InputStatistics(64, with_deviation=True), LayerWeights()
    statistics.add(x, x)
    Int8Groups(GPTQOptions())({"m": weight.clone()}, {"m": INT8}, statistics, result)
    quantized = result.quantized["m"]
    assert quantized.scheme == INT8 and quantized.codes.dtype == torch.int8 and (quantized.scales > 0).all()
    scale = weight.abs().amax(1, keepdim=True) / 127
    nearest = (weight / scale).round() * scale
    assert ((dequantize(quantized) - weight) @ x.T).norm() < 0.8 * ((nearest - weight) @ x.T).norm()


@pytest.mark.parametrize("family", ["llama", "qwen3", "mixtral"])
def test_smoothquant_models(tiny_model: TinyModel, tmp_path: Path, family: str) -> None:
    source = tiny_model(family)
    report = quantize_model(str(source), "smoothquant", tmp_path / "out", calibration=FEW)
    assert report.errors and all(error.relative_rms < 0.03 for error in report.errors)
    assert divergence(tmp_path / "out", source) < 0.05


@pytest.mark.parametrize("dtype", ["fp8", "int8"])
@pytest.mark.parametrize("spec", ["rtn:8:32:sym", "fp8", "gptq:8:32:sym"])
def test_kv_cache_scales(tiny_model: TinyModel, tmp_path: Path, spec: str, dtype: str) -> None:
    """The first layer's, from keys after their rotary embedding and values, computed here."""
    source = tiny_model("llama")
    asked = dataclasses.replace(parse_quantize_spec(spec), kv_cache=dtype)
    quantize_model(str(source), asked, tmp_path / "out", calibration=dataclasses.replace(FEW, num_sequences=8))
    written = load_file(tmp_path / "out" / "model.safetensors")
    model, hidden = first_layer(source)
    layer = model.load_layer(0)
    with torch.inference_mode():
        read = layer.input_layernorm(hidden)
        value = layer.self_attn.v_proj(read).abs().max()
        cos, sin = model._arguments[0]["position_embeddings"]
        key = layer.self_attn.k_proj(read).view(8, 32, 2, 16)
        turned = torch.cat([-key[..., 8:], key[..., :8]], -1)
        key = (key * cos[:1, :, None] + turned * sin[:1, :, None]).abs().max()
    limit = {"fp8": 448.0, "int8": 127.0}[dtype]
    for side, largest in (("k", key), ("v", value)):
        scale = float(written[f"model.layers.0.self_attn.{side}_scale"])
        assert scale == pytest.approx(float(largest) / limit, rel=0.03)
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["kv_cache_scheme"]["type"] == {"fp8": "float", "int8": "int"}[dtype]


def test_no_key_at_all() -> None:
    ranges = KVRanges()
    ranges.update(torch.zeros(1, 2), torch.full((1, 2), -448.0))
    assert ranges.scales("fp8").tolist() == [1.0, 1.0] and ranges.scales("int8").tolist()[0] == 1.0


def test_gptq_files_hold_no_kv_scales(tiny_model: TinyModel, tmp_path: Path) -> None:
    spec = dataclasses.replace(parse_quantize_spec("rtn:4:32"), kv_cache="fp8", format="gptq_v2")
    with pytest.raises(ConfigError, match="KV cache; formats that can: compressed-tensors"):
        quantize_model(str(tiny_model("llama")), spec, tmp_path / "out")
    assert not (tmp_path / "out").exists()
