"""AWQ: scales that change nothing but the rounding, found on outputs; clipping on its own objective."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from quantized_models import FEW, divergence, first_layer
from safetensors.torch import load_file
from torch import Tensor
from twofold.quant import quantize_model
from twofold.quant.canonical import dequantize
from twofold.quant.methods.awq import diagonal_blocks, quantize_clipped, search_scale
from twofold.quant.methods.folds import apply_fold, find_folds
from twofold.quant.methods.rtn import quantize_rtn
from twofold.quant.methods.scaling import scale_layer
from twofold.quant.scheme import WeightOnly

TinyModel = Callable[..., Path]
SOURCES = {
    "llama": ["input_layernorm", "self_attn.v_proj", "post_attention_layernorm", "mlp.up_proj"],
    "gemma2": ["input_layernorm", "self_attn.v_proj", "pre_feedforward_layernorm", "mlp.up_proj"],
    "phi3": ["input_layernorm", "post_attention_layernorm"],
    "mixtral": ["input_layernorm", "self_attn.v_proj", "post_attention_layernorm"]
    + [f"mlp.experts.{expert}.w3" for expert in range(5)],
    "qwen2-moe": ["input_layernorm", "self_attn.v_proj", "post_attention_layernorm"]
    + [f"mlp.experts.{expert}.up_proj" for expert in range(6)]
    + ["mlp.shared_expert.up_proj"],
}


@pytest.mark.parametrize("family", [*SOURCES, "llama-bias", "gemma", "gemma3", "qwen3", "olmoe"])
def test_a_folded_scale_changes_no_output(tiny_model: TinyModel, family: str) -> None:
    """Any scale at all; norms with an offset, grouped KV heads, biases, routers and shared experts too."""
    model, hidden = first_layer(tiny_model(family), index=1)
    layer = model.load_layer(1).double()
    hidden = hidden.double()
    expected = run_double(model, layer, hidden)
    folds = list(find_folds(layer))
    if family in SOURCES:
        assert [fold.source for fold in folds] == SOURCES[family]
    for seed, fold in enumerate(folds):
        before = layer.get_submodule(fold.source).weight.data.clone()
        width = layer.get_parameter(fold.readers[0]).shape[1]
        generator = torch.Generator().manual_seed(seed)
        scale = fold.shared(torch.rand(width, generator=generator, dtype=torch.float64) * 3 + 0.2)
        apply_fold(layer, fold, scale)
        assert not torch.equal(layer.get_submodule(fold.source).weight.data, before)
        torch.testing.assert_close(run_double(model, layer, hidden), expected, rtol=1e-4, atol=1e-4)


def run_double(model: object, layer: torch.nn.Module, hidden: Tensor) -> Tensor:
    arguments = {
        name: tuple(part.double() for part in value) if isinstance(value, tuple) else value
        for name, value in model._arguments[1].items()  # type: ignore[attr-defined]
    }
    with torch.inference_mode():
        output = layer(hidden, **arguments)
    return output[0] if isinstance(output, tuple) else output


def test_a_fold_that_has_other_readers_is_taken_back(tiny_model: TinyModel) -> None:
    model, hidden = first_layer(tiny_model("llama"))
    layer = model.load_layer(0)
    norm = layer.input_layernorm

    class Parallel(torch.nn.Module):
        """A block that reads the attention's norm too, as parallel families have."""

        def __init__(self, mlp: torch.nn.Module) -> None:
            super().__init__()
            self.mlp, self.other = mlp, [layer.input_layernorm]

        def forward(self, x: Tensor) -> Tensor:
            return self.mlp(x) + self.other[0](x)

    layer.mlp = Parallel(layer.mlp)
    kept = norm.weight.data.clone()
    schemes = {f"self_attn.{name}": WeightOnly(3, 32, True) for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
    with torch.inference_mode():
        expected = model.run(0, layer, hidden)
        notes = scale_layer(
            layer,
            schemes,
            lambda sample: sample.fold.shared(sample.inputs.abs().mean(0)),
            lambda one: model.run(0, one, hidden),
        )
        torch.testing.assert_close(model.run(0, layer, hidden), expected, rtol=1e-3, atol=1e-3)
    assert len(notes) == 1 and notes[0].startswith("input_layernorm keeps its scale")
    torch.testing.assert_close(norm.weight.data, kept)


def test_the_scale_lowers_the_blocks_error(tiny_model: TinyModel) -> None:
    model, hidden = first_layer(tiny_model("llama"))
    scheme = WeightOnly(3, 32, False)

    def error(layer: torch.nn.Module, expected: Tensor) -> float:
        for module in layer.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight.data.copy_(dequantize(quantize_rtn(module.weight.data, scheme)))
        return float((model.run(0, layer, hidden) - expected).norm())

    with torch.inference_mode():
        layer = model.load_layer(0)
        # A few loud features, as real activations have.
        layer.input_layernorm.weight.data[::17] *= 20
        expected = model.run(0, layer, hidden)
        plain = model.load_layer(0)
        plain.input_layernorm.weight.data[::17] *= 20
        schemes = {name: scheme for name, module in layer.named_modules() if isinstance(module, torch.nn.Linear)}
        assert not scale_layer(layer, schemes, search_scale, lambda one: model.run(0, one, hidden))
        assert error(layer, expected) < 0.8 * error(plain, expected)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_clipping_raises_no_groups_output_error(seed: int, symmetric: bool) -> None:
    """Not one group's, since the search begins with what nearest rounding found; their sum is well below."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(300, 80, generator=generator) @ torch.randn(80, 80, generator=generator)
    x *= torch.rand(80, generator=generator).mul(3).exp()
    weight, scheme = torch.randn(40, 80, generator=generator), WeightOnly(3, 32, symmetric)
    clipped, nearest = (
        dequantize(one) for one in (quantize_clipped(weight, x.T @ x / 300, scheme), quantize_rtn(weight, scheme))
    )
    for start in (0, 32, 64):
        part = slice(start, start + 32)
        errors = [((one - weight)[:, part].double() @ x[:, part].T.double()).norm(dim=1) for one in (clipped, nearest)]
        assert (errors[0] <= errors[1] * 1.0001).all() and errors[0].sum() < 0.97 * errors[1].sum()


def test_diagonal_blocks() -> None:
    matrix = torch.randn(10, 10)
    blocks = diagonal_blocks(matrix, 4)
    assert torch.equal(blocks[0], matrix[:4, :4]) and torch.equal(blocks[1], matrix[4:8, 4:8])
    assert torch.equal(blocks[2][:2, :2], matrix[8:, 8:]) and not blocks[2][2:].any()


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen2-moe"])
def test_closer_than_rounded_to_nearest(tiny_model: TinyModel, tmp_path: Path, family: str) -> None:
    source = tiny_model(family)
    quantize_model(str(source), "rtn:3:32", tmp_path / "rtn")
    report = quantize_model(str(source), "awq:3:32", tmp_path / "awq", calibration=FEW)
    assert divergence(tmp_path / "awq", source) < divergence(tmp_path / "rtn", source)
    assert all(error.relative_rms < 0.4 for error in report.errors)
    original, written = load_file(source / "model.safetensors"), load_file(tmp_path / "awq" / "model.safetensors")
    norm = "model.layers.1.input_layernorm.weight"
    assert not torch.equal(original[norm].half(), written[norm])
    assert json.loads((tmp_path / "awq" / "config.json").read_text())["quantization_config"]["bits"] == 3
