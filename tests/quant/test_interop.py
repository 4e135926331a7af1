"""What we write, read by the tools that own the formats. Each test runs where its tool can be imported:

    make interop        # compressed-tensors, gptqmodel and autoawq beside the environment, then these tests

The fine-grained fp8 reader is transformers' own, so that one always runs.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tiny_models import judge, judge_logits
from torch import Tensor, nn
from twofold import LLM
from twofold.engine.layers.linear import Linear
from twofold.quant import QuantizeSpec, quantize_model
from twofold.quant import spec as spec_module
from twofold.quant.calibration import CalibrationSpec
from twofold.quant.scheme import Activation, Element, Fp8, Int8

TinyModel = Callable[..., Path]
PROMPT = list(range(3, 50))
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_key_value_heads": 4}
INT8 = Activation(Element.INT8)


def quantized(tiny_model: TinyModel, folder: Path, spec: QuantizeSpec, family: str = "llama") -> Path:
    source = tiny_model(family, **({} if "moe" in family else SIZES))
    quantize_model(str(source), spec, folder / "out")
    return folder / "out"


def ours(folder: Path) -> Tensor:
    with LLM(str(folder), device="cpu", dtype="float32") as llm:
        return llm.logits(PROMPT)


def read_by_transformers(folder: Path, **options: Any) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", **options
    ).eval()


def row_errors(actual: Tensor, expected: Tensor) -> Tensor:
    return (actual - expected).norm(dim=1) / expected.norm(dim=1)


def errors_in_step(folder: Path, model: transformers.PreTrainedModel, expected: Tensor) -> Tensor:
    """Row errors [P + 1,T]: the inputs of our P products, then our logits, against those of ``model`` (``expected``).

    Each of our products goes on with the model's input. Alone, the two drift apart: sums in another order move a last
    bit, somewhere that carries a value across a rounding tie, and all rows that attend to it get other values. Such
    ties are no accident: the largest value of a row of int8 lies on one, x / (|x| / 127.5), whenever it is negative.
    """
    theirs: list[Tensor] = []
    hooks = [
        module.register_forward_pre_hook(lambda _, inputs: theirs.append(inputs[0].flatten(0, -2)), prepend=True)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and not name.endswith(("k_proj", "v_proj", "up_proj"))  # read what another did
    ]
    judge_logits(model, PROMPT)
    for hook in hooks:
        hook.remove()
    errors, inputs, product = [], iter(theirs), Linear.__call__

    def in_step(layer: Linear, x: Tensor) -> Tensor:
        errors.append(row_errors(x, wanted := next(inputs)))
        return product(layer, wanted)

    with LLM(str(folder), device="cpu", dtype="float32") as llm, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Linear, "__call__", in_step)
        errors.append(row_errors(llm.logits(PROMPT), expected))
    assert len(errors) == len(theirs) + 1
    return torch.stack(errors)


def grouped(bits: int, group_size: int, symmetric: bool, name: str) -> QuantizeSpec:
    return QuantizeSpec(bits=bits, group_size=group_size, symmetric=symmetric, format=name)


class TestCompressedTensors:
    """Through transformers' quantizer, with the tool's own decompression and activation quantization."""

    @pytest.fixture(autouse=True)
    def tool(self) -> None:
        pytest.importorskip("compressed_tensors")
        pytest.importorskip("accelerate")

    @pytest.mark.parametrize(("bits", "group_size"), [(4, 32), (4, -1), (8, 128), (8, -1), (3, 32)])
    def test_symmetric(self, tiny_model: TinyModel, tmp_path: Path, bits: int, group_size: int) -> None:
        folder = quantized(tiny_model, tmp_path, grouped(bits, group_size, True, "compressed-tensors"))
        expected = judge_logits(read_by_transformers(folder), PROMPT)
        assert float(row_errors(ours(folder), expected).max()) < 1e-4

    @pytest.mark.parametrize(("bits", "group_size"), [(4, 32), (8, -1)])
    def test_asymmetric(self, tiny_model: TinyModel, tmp_path: Path, bits: int, group_size: int) -> None:
        """Dequantized by the tool at load, in its scales' 16 bits: transformers 5.24 cannot keep packed zeros."""
        folder = quantized(tiny_model, tmp_path, grouped(bits, group_size, False, "compressed-tensors"))
        config = transformers.CompressedTensorsConfig(dequantize=True)
        expected = judge_logits(read_by_transformers(folder, quantization_config=config), PROMPT)
        assert float(row_errors(ours(folder), expected).max()) < 1e-2

    def test_experts(self, tiny_model: TinyModel, tmp_path: Path) -> None:
        folder = quantized(tiny_model, tmp_path, grouped(4, 32, True, "compressed-tensors"), "qwen3-moe")
        expected = judge_logits(read_by_transformers(folder), PROMPT)
        assert float(row_errors(ours(folder), expected).median()) < 1e-3

    @pytest.mark.parametrize(
        "scheme",
        [
            Fp8((1, -1), Activation(Element.FP8)),
            Fp8((-1, -1), Activation(Element.FP8)),
            Fp8((128, 128), Activation(Element.FP8, 128)),
            Int8((1, -1), INT8),
            Int8((1, -1), INT8, symmetric=False),
        ],
        ids=str,
    )
    def test_eight_bits(
        self, tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: Fp8 | Int8
    ) -> None:
        """Product by product to the last digits of float32; alone, as far as single codes that flip move a row."""
        monkeypatch.setitem(spec_module.VARIANTS, "dynamic", scheme)
        folder = quantized(tiny_model, tmp_path, QuantizeSpec(method="fp8", format="compressed-tensors"))
        model = read_by_transformers(folder)
        expected = judge_logits(model, PROMPT)
        assert float(errors_in_step(folder, model, expected).max()) < 1e-5
        assert float(row_errors(ours(folder), expected).max()) < 0.1

    @pytest.mark.parametrize(
        "spec",
        [QuantizeSpec(method="fp8", variant="static"), QuantizeSpec(method="smoothquant")],
        ids=lambda spec: str(spec),
    )
    def test_calibrated(self, tiny_model: TinyModel, tmp_path: Path, spec: QuantizeSpec) -> None:
        """Static input scales come from the file."""
        source = tiny_model("llama", **SIZES)
        quantize_model(str(source), spec, tmp_path / "out", calibration=CalibrationSpec(num_sequences=4, length=32))
        model = read_by_transformers(tmp_path / "out")
        expected = judge_logits(model, PROMPT)
        assert float(errors_in_step(tmp_path / "out", model, expected).max()) < 1e-5
        assert float(row_errors(ours(tmp_path / "out"), expected).max()) < 0.1

    def test_cache_scales(self, tiny_model: TinyModel, tmp_path: Path) -> None:
        """Under the names that llm-compressor's own files have; transformers 5.24 uses neither those nor ours."""
        source = tiny_model("llama", **SIZES)
        spec = QuantizeSpec(symmetric=True, kv_cache="fp8")
        quantize_model(str(source), spec, tmp_path / "out", calibration=CalibrationSpec(num_sequences=4, length=32))
        model, loading = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "out", dtype=torch.float32, output_loading_info=True
        )
        names = {f"model.layers.{layer}.self_attn.{side}_scale" for layer in (0, 1) for side in ("k", "v")}
        assert set(loading["unexpected_keys"]) <= names and not loading["missing_keys"]
        assert float(row_errors(ours(tmp_path / "out"), judge_logits(model.eval(), PROMPT)).max()) < 1e-4


@pytest.mark.parametrize("name", ["gptq", "gptq_v2", "awq"])
@pytest.mark.parametrize(("bits", "group_size"), [(4, 32), (8, -1)])
def test_gptqmodel(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, bits: int, group_size: int
) -> None:
    """Its torch kernels compute in 16 bits, so that logits are compared with what float16 allows."""
    monkeypatch.setenv("GPTQMODEL_CPU_WORKERS", "2")
    gptqmodel = pytest.importorskip("gptqmodel")
    if name == "awq" and bits != 4:
        pytest.skip("AWQ has 4 bits")
    folder = quantized(tiny_model, tmp_path, grouped(bits, group_size, name == "gptq", name))
    options = {"backend": gptqmodel.BACKEND.TORCH, "device": "cpu", "dtype": torch.float16}
    model = gptqmodel.GPTQModel.load(str(folder), **options).model
    expected = model(torch.tensor([PROMPT])).logits[0].float().detach()
    assert float(row_errors(ours(folder), expected).median()) < 1e-2


def autoawq_dequantize() -> Callable[..., Tensor]:
    """AutoAWQ's unpacking without its models, which need an older transformers."""
    spec = importlib.util.find_spec("awq")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("autoawq is not installed")
    package = types.ModuleType("awq")
    package.__path__ = list(spec.submodule_search_locations)
    before = {name for name in sys.modules if name.split(".")[0] == "awq"}
    sys.modules["awq"] = package
    try:
        return importlib.import_module("awq.utils.packing_utils").dequantize_gemm
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "awq"]:
            if name not in before:
                del sys.modules[name]


@pytest.mark.parametrize("group_size", [32, 128])
def test_autoawq(tiny_model: TinyModel, tmp_path: Path, group_size: int) -> None:
    dequantize = autoawq_dequantize()
    folder = quantized(tiny_model, tmp_path, grouped(4, group_size, False, "awq"))
    model = judge(tiny_model("llama", **SIZES))
    tensors = load_file(folder / "model.safetensors")
    for name, module in model.named_modules():
        if f"{name}.qweight" in tensors:
            parts = [tensors[f"{name}.{part}"] for part in ("qweight", "qzeros", "scales")]
            module.weight.data.copy_(dequantize(*parts, 4, group_size).T)
    assert float(row_errors(ours(folder), judge_logits(model, PROMPT)).max()) < 1e-2


def test_fine_grained_fp8(tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers dequantizes the weights; inputs are rounded here, in groups of 128, by the format's definition."""
    from transformers.quantizers import quantizer_finegrained_fp8 as quantizer

    pytest.importorskip("accelerate")
    monkeypatch.setattr(quantizer.FineGrainedFP8HfQuantizer, "validate_environment", lambda self, *_, **__: None)
    folder = quantized(tiny_model, tmp_path, QuantizeSpec(method="fp8", variant="block"))
    config = transformers.FineGrainedFP8Config(dequantize=True)
    model = read_by_transformers(folder, quantization_config=config)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            module.register_forward_pre_hook(lambda _, inputs: (rounded_inputs(inputs[0]),))
    expected = judge_logits(model, PROMPT)
    assert float(errors_in_step(folder, model, expected).max()) < 1e-5
    assert float(row_errors(ours(folder), expected).max()) < 0.1


def rounded_inputs(x: Tensor) -> Tensor:
    groups = x.unflatten(-1, (-1, 128))
    scales = groups.abs().amax(-1, keepdim=True) / 448
    return ((groups / scales).to(torch.float8_e4m3fn).float() * scales).flatten(-2)
