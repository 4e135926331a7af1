"""``--quantization``: plain checkpoints rounded while they load, against rounding written down again here."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import judge, judge_logits
from torch import Tensor
from twofold import LLM, cli
from twofold.engine.config import QUANTIZATIONS, EngineConfig
from twofold.errors import CheckpointError, ConfigError
from twofold.quant.at_load import SCHEMES, load_format, quantize
from twofold.quant.canonical import DenseWeight, dequantize
from twofold.quant.methods.rtn import quantize_rtn
from twofold.quant.scheme import Dense, WeightOnly

TinyModel = Callable[..., Path]
TOKENS = [5, 80, 255, 7, 7, 31]


def rounded(matrix: Tensor, kind: str) -> Tensor:
    """The matrix that a rounded one stands for, row by row."""
    if kind == "int4":
        return dequantize(quantize_rtn(matrix, WeightOnly(4, 32, symmetric=False)))
    rows = []
    for row in matrix.double():
        step = row.abs().max().float().div(127 if kind == "int8" else 448) or torch.tensor(1.0)
        scaled = row.float() / step
        values = scaled.round() if kind == "int8" else scaled.to(torch.float8_e4m3fn).float()
        rows.append(values * step)
    return torch.stack(rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", QUANTIZATIONS)
def test_values_and_size(kind: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    matrix = (torch.randn(40, 144, generator=generator) * torch.logspace(-4, 3, 40)[:, None]).to(dtype)
    matrix[3] = 0
    matrix[4, 7] = 1e6
    weight = quantize(DenseWeight(matrix), kind, "w")
    assert weight.scheme == SCHEMES[kind] and weight.shape == (40, 144)
    torch.testing.assert_close(dequantize(weight), rounded(matrix.float(), kind), rtol=1e-6, atol=0)
    bits = 8 * weight.nbytes / matrix.numel()
    assert bits < (8.3 if kind != "int4" else 4.9)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_error_is_half_a_step_of_the_row(kind: str) -> None:
    matrix = torch.randn(16, 200, generator=torch.Generator().manual_seed(1))
    error = (dequantize(quantize(DenseWeight(matrix), kind, "w")) - matrix).abs()
    largest = matrix.abs().amax(1, keepdim=True)
    # fp8 has three bits behind the leading one; its smallest step is 2 ** -9 of a code.
    bound = largest / 254 if kind == "int8" else torch.maximum(matrix.abs() / 16, largest / 448 * 2**-10)
    assert bool((error <= bound * 1.0001).all())


def test_what_is_not_finite_is_named() -> None:
    for value in (float("nan"), float("inf")):
        with pytest.raises(CheckpointError, match=r"layer\.weight"):
            quantize(DenseWeight(torch.full((2, 32), value)), "int8", "layer.weight")


@pytest.mark.parametrize("kind", QUANTIZATIONS)
@pytest.mark.parametrize("family", ["llama-bias", "qwen3", "gemma3", "phi3", "mixtral", "qwen2-moe"])
def test_engine_computes_the_rounded_model(tiny_model: TinyModel, family: str, kind: str) -> None:
    path = tiny_model(family, moe_intermediate_size=64) if family == "qwen2-moe" else tiny_model(family)
    model = judge(path)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Routers of experts and the gate of a shared one stay; transformers holds experts in one tensor.
            if ".layers." in name and parameter.dim() > 1 and not name.endswith("gate.weight"):
                parameter.copy_(rounded(parameter.flatten(0, -2), kind).view(parameter.shape))
    with LLM(str(path), device="cpu", dtype="float32", quantization=kind) as llm:
        torch.testing.assert_close(llm.logits(TOKENS), judge_logits(model, TOKENS), rtol=1e-3, atol=1e-3)
        schemes = {row["layer"]: row["scheme"] for row in llm.info.kernels if "layer" in row}
    plain = {layer for layer in schemes if layer.endswith(("lm_head", "gate"))}
    assert {schemes[layer] for layer in plain} == {str(Dense())}
    assert {scheme for layer, scheme in schemes.items() if layer not in plain} == {str(SCHEMES[kind])}


def test_a_quantized_checkpoint_is_refused(
    tmp_path: Path, tiny_model: TinyModel, capsys: pytest.CaptureFixture
) -> None:
    for quantization in ({"quant_method": "gptq", "bits": 4, "group_size": 32}, {"quant_method": "fp8"}):
        with pytest.raises(ConfigError, match=f"already quantized .{quantization['quant_method']}"):
            load_format(quantization, "int8")
    path = tmp_path / "model"
    shutil.copytree(tiny_model("llama"), path)
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    (path / "config.json").write_text(json.dumps(config))
    assert cli.main(["plan", str(path), "--device", "cpu", "--quantization", "int8"]) == 2
    assert "already quantized (gptq)" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="already quantized"):
        LLM(str(path), device="cpu", quantization="int8")


def test_a_missing_bias_is_still_an_error(tmp_path: Path, tiny_model: TinyModel) -> None:
    path = tmp_path / "model"
    shutil.copytree(tiny_model("qwen2"), path)
    tensors = load_file(path / "model.safetensors")
    del tensors["model.layers.1.self_attn.k_proj.bias"]
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.k_proj\.bias"):
        LLM(str(path), device="cpu", quantization="int8")


def test_options_that_make_no_sense() -> None:
    with pytest.raises(ConfigError, match="int8, int4, fp8"):
        EngineConfig(model="m", quantization="int3")
    with pytest.raises(ConfigError, match="exclude"):
        EngineConfig(model="m", quantization="int8", quantize="rtn:4:32")
    assert load_format(None, None).name == "dense"
