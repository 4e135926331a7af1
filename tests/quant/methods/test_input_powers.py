"""What weights alone tell of inputs: features that a norm or the rows before make loud count more in the rounding."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from quantized_models import divergence, first_layer
from safetensors.torch import load_file, save_file
from twofold.engine.model_config import load_model_config
from twofold.engine.sources import resolve_model
from twofold.engine.weights import open_checkpoint
from twofold.quant import quantize_model
from twofold.quant.canonical import dequantize
from twofold.quant.formats.writers import writer_for
from twofold.quant.methods.input_powers import InputPowers, relative
from twofold.quant.methods.rtn import quantize_rtn
from twofold.quant.plan import make_plan
from twofold.quant.scheme import WeightOnly
from twofold.quant.spec import parse_quantize_spec

TinyModel = Callable[..., Path]
PREFIX = "model.layers.0"


def loud_model(original: Path, folder: Path, times: float = 8.0) -> Path:
    """One in eight features of the norms, values and up projections is so many times as large as the others."""
    source = Path(shutil.copytree(original, folder / "loud"))
    tensors = load_file(source / "model.safetensors")
    for name, tensor in tensors.items():
        if ("norm" in name and "layers" in name) or name.endswith(("v_proj.weight", "up_proj.weight")):
            tensor[::8] *= times
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    return source


def powers_of(source: Path) -> dict[str, torch.Tensor]:
    files = resolve_model(str(source))
    checkpoint = open_checkpoint(files)
    spec = parse_quantize_spec("rtn:4:32")
    plan = make_plan(checkpoint, spec, writer_for(spec))
    powers = InputPowers(lambda name: checkpoint.get(f"{name}.weight").float(), load_model_config(files))
    return powers(next(layer for layer in plan.layers if layer.number == 0))


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_powers_follow_the_inputs_that_a_run_shows(tiny_model: TinyModel, tmp_path: Path, family: str) -> None:
    """Of every module, against the mean squares of its inputs on text."""
    source = loud_model(tiny_model(family), tmp_path)
    powers = powers_of(source)
    model, hidden = first_layer(source)
    layer = model.load_layer(0)
    seen: dict[str, torch.Tensor] = {}
    for name in powers:
        local = name.removeprefix(f"{PREFIX}.")
        layer.get_submodule(local).register_forward_pre_hook(
            lambda module, args, name=name: seen.update({name: args[0].flatten(0, -2).square().mean(0)})
        )
    model.run(0, layer, hidden)
    assert {name.rpartition(".")[2] for name in powers} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    }  # fmt: skip
    for name, power in powers.items():
        both = torch.stack([power.log(), seen[name].log()])
        assert float(both.corrcoef()[0, 1]) > 0.7, name


def test_loud_columns_are_rounded_more_exactly() -> None:
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    power = torch.ones(64)
    power[::8] = 100.0
    scheme = WeightOnly(3, 32)
    plain, weighed = (
        (dequantize(quantize_rtn(weight, scheme, importance=importance)) - weight).square() @ power
        for importance in (None, power)
    )
    assert float(weighed.sum()) < 0.9 * float(plain.sum())


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3-moe"])
def test_the_result_is_closer(tiny_model: TinyModel, tmp_path: Path, family: str) -> None:
    """Against the same rounding without the guess."""
    source = loud_model(tiny_model(family), tmp_path, times=64.0)
    quantize_model(str(source), "rtn:3:32", tmp_path / "weighed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InputPowers, "__call__", lambda self, layer: {})
        quantize_model(str(source), "rtn:3:32", tmp_path / "plain")
    assert divergence(tmp_path / "weighed", source) < divergence(tmp_path / "plain", source)


@pytest.mark.parametrize("power", [torch.zeros(8), torch.full((8,), torch.nan), torch.ones(7)], ids=str)
def test_what_tells_nothing_is_left_out(power: torch.Tensor) -> None:
    assert relative(power, 8) is None


def test_no_column_is_without_weight() -> None:
    power = torch.zeros(8)
    power[0] = 1.0
    found = relative(power, 8)
    assert found is not None and float(found.min()) > 0
