"""Quantize, then compute: the engine's logits against transformers with the weights an independent decoder reads."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from gptq_oracle import decode_linear
from quantized_models import FEW
from safetensors.torch import load_file, save_file
from tiny_models import judge, judge_logits
from twofold import LLM
from twofold.engine.sources import resolve_model
from twofold.errors import TwofoldError
from twofold.quant import ensure, quantize_model

TinyModel = Callable[..., Path]
VERSIONS = {"gptq": 1, "gptq_v2": 2}


def dense_copy(quantized: Path, folder: Path) -> Path:
    """The quantized checkpoint as a plain float32 one."""
    folder.mkdir()
    for path in quantized.glob("*.json"):
        (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((quantized / "config.json").read_text())
    layout = config.pop("quantization_config")
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "quantize_config.json").unlink()
    tensors = load_file(quantized / "model.safetensors")
    modules = [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]
    dense = {name: tensor.float() for name, tensor in tensors.items() if name.rpartition(".")[0] not in modules}
    for module in modules:
        parts = {part: tensors[f"{module}.{part}"] for part in ("qweight", "qzeros", "scales", "g_idx")}
        weight = decode_linear(parts, layout["bits"], VERSIONS[layout["checkpoint_format"]])
        dense[f"{module}.weight"] = torch.from_numpy(weight).float()
        if f"{module}.bias" in tensors:
            dense[f"{module}.bias"] = tensors[f"{module}.bias"].float()
    save_file(dense, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def relative_error(logits: torch.Tensor, expected: torch.Tensor) -> float:
    return float((logits - expected).norm() / expected.norm())


@pytest.mark.parametrize(
    ("family", "spec"),
    [
        ("llama", "rtn:4:32"),
        ("llama-tied", "rtn:4:32:sym"),
        ("qwen2", "rtn:3:32"),
        ("qwen3", "rtn:8:-1"),
        ("llama", "rtn:4:64"),  # down_proj (96) does not divide and stays plain
        ("mistral", "rtn:2:16:sym"),
        ("mixtral", "rtn:4:32"),
        ("qwen2-moe", "rtn:8:16"),
        ("gemma2", "rtn:4:32"),
        ("gemma3", "rtn:4:32:sym"),
        ("phi3", "rtn:4:32"),
    ],
)
def test_logits(tiny_model: TinyModel, tmp_path: Path, family: str, spec: str) -> None:
    quantize_model(str(tiny_model(family)), spec, tmp_path / "quantized")
    expected = judge(dense_copy(tmp_path / "quantized", tmp_path / "dense"))
    prompt = [(7 * i * i + 3) % 256 for i in range(40)]
    with LLM(str(tmp_path / "quantized"), device="cpu", dtype="float32") as llm:
        assert relative_error(llm.logits(prompt), judge_logits(expected, prompt)) < 1e-4


@pytest.mark.parametrize("expert", [0, 3])
def test_an_expert_whose_zeros_are_all_the_middle_one(tiny_model: TinyModel, tmp_path: Path, expert: int) -> None:
    """Its scheme would be symmetric; beside asymmetric ones its zeros are spelled out, whichever comes first."""
    quantize_model(str(tiny_model("mixtral")), "rtn:4:32", tmp_path / "quantized")
    file = tmp_path / "quantized" / "model.safetensors"
    tensors = load_file(file)
    version = json.loads((tmp_path / "quantized" / "config.json").read_text())["quantization_config"]
    middle = 0x77777777 if VERSIONS[version["checkpoint_format"]] == 1 else 0x88888888 - (1 << 32)
    for name, tensor in tensors.items():
        if f".experts.{expert}." in name and name.endswith("qzeros"):
            tensor.fill_(middle)
    save_file(tensors, file, metadata={"format": "pt"})
    expected = judge(dense_copy(tmp_path / "quantized", tmp_path / "dense"))
    prompt = [(7 * i * i + 3) % 256 for i in range(40)]
    with LLM(str(tmp_path / "quantized"), device="cpu", dtype="float32") as llm:
        assert relative_error(llm.logits(prompt), judge_logits(expected, prompt)) < 1e-4
        schemes = [row["scheme"] for row in llm.info.kernels if row["op"] == "expert_linear" and "layer" in row]
    assert set(schemes) == {"w4g32 asym"}


@pytest.mark.parametrize(
    "spec", ["rtn:4:32", "gptq:4:64:sym", "awq:4:128", "smoothquant", "fp8", "fp8:static", "fp8:block", "auto:4.75"]
)
def test_in_one_step(
    tiny_model: TinyModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    spec: str,
) -> None:
    """Every method: shown, served like the checkpoint that two steps make, and found again at the second start."""
    # Results only: compiled kernels stay where they are.
    monkeypatch.setattr(ensure, "env", SimpleNamespace(cache_dir=lambda: tmp_path / "cache"))
    model = str(tiny_model("llama", hidden_size=128, intermediate_size=256, num_key_value_heads=4))
    monkeypatch.setattr(
        ensure, "quantize_model", lambda *words, **options: quantize_model(*words, **options | {"calibration": FEW})
    )
    quantize_model(model, spec, tmp_path / "quantized", calibration=FEW)
    chat = [{"role": "user", "content": "hello"}]
    with (
        LLM(str(tmp_path / "quantized"), device="cpu", dtype="float32") as two_steps,
        LLM(model, quantize=spec, device="cpu", dtype="float32") as one_step,
    ):
        assert torch.equal(two_steps.logits([1, 2, 3, 4]), one_step.logits([1, 2, 3, 4]))
        prompt = one_step.tokenizer.encode_chat(chat)
        assert one_step.generate([prompt], one_step.default_params(max_tokens=4))[0].outputs[0].token_ids
    assert f"({spec})" in capsys.readouterr().err
    with LLM(model, quantize=spec, device="cpu", dtype="float32"):
        assert "layers" not in capsys.readouterr().err


@pytest.fixture(scope="module")
def smollm2() -> Iterator[str]:
    """The demo model; skipped where it can be neither found nor fetched."""
    try:
        yield str(resolve_model("smollm2-135m-instruct").path)
    except TwofoldError as error:
        pytest.skip(str(error))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("spec", ["rtn:4:32", "rtn:4:32:sym"])
def test_smollm2(smollm2: str, tmp_path: Path, spec: str) -> None:
    report = quantize_model(smollm2, spec, tmp_path / "quantized")
    assert len(report.errors) == 210 and not report.plain and report.worst.relative_rms < 0.11
    expected = judge(dense_copy(tmp_path / "quantized", tmp_path / "dense"))
    with LLM(str(tmp_path / "quantized"), device="cpu", dtype="float32") as llm:
        prompt = llm.tokenizer.encode_chat([{"role": "user", "content": "Name 3 rivers of Europe and their lengths."}])
        assert relative_error(llm.logits(prompt), judge_logits(expected, prompt)) < 1e-4
        answer = llm.generate([prompt], llm.default_params(temperature=0.0, max_tokens=24))[0].outputs[0].token_ids
    predicted = judge_logits(expected, prompt + answer).argmax(-1).tolist()
    assert predicted[len(prompt) - 1 : -1] == answer
