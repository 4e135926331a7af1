"""Whole models in each format, written here from the formats' definitions, against transformers' float32 model.

The judge holds the dequantized weights; where activations are quantized, a hook rounds the input of its linear layers.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import awq_oracle
import numpy as np
import pytest
import torch
from gptq_oracle import write_stream
from safetensors.torch import load_file, save_file
from tiny_models import build_tiny_model, judge, judge_logits
from torch import Tensor
from twofold import LLM
from twofold.errors import CheckpointError, UnsupportedError

PROMPT = list(range(3, 60))
GROUP = 32
Stored = tuple[dict[str, Tensor], Tensor]


def awq(weight: Tensor) -> Stored:
    """4 bits, groups of 32, asymmetric."""
    grouped = weight.unflatten(1, (-1, GROUP))
    low, high = grouped.amin(2).clamp(max=0), grouped.amax(2).clamp(min=0)
    scales = ((high - low) / 15).half().float()
    zeros = (-low / scales).round()
    codes = ((grouped / scales[..., None]).round() + zeros[..., None]).clamp(0, 15)
    dense = ((codes - zeros[..., None]) * scales[..., None]).flatten(1)
    numbers = (codes.flatten(1).numpy().astype(int), zeros.numpy().astype(int), scales.numpy())
    return awq_oracle.encode("gemm", *numbers, GROUP), dense


def packed(weight: Tensor) -> Stored:
    """compressed-tensors, 8 bits, groups of 32, symmetric."""
    grouped = weight.unflatten(1, (-1, GROUP))
    scales = (grouped.abs().amax(2) / 127.5).bfloat16().float()
    codes = (grouped / scales[..., None]).round().clamp(-128, 127)
    words = [write_stream((row + 128).tolist(), 8) for row in codes.flatten(1).numpy().astype(np.int64)]
    tensors = {
        "weight_packed": torch.tensor(words, dtype=torch.int32),
        "weight_scale": scales.bfloat16(),
        "weight_shape": torch.tensor(weight.shape),
    }
    return tensors, (codes * scales[..., None]).flatten(1)


def int8(weight: Tensor) -> Stored:
    """compressed-tensors W8A8 with static activations of scale 1/16."""
    scales = weight.abs().amax(1, keepdim=True) / 127.5
    codes = (weight / scales).round().clamp(-128, 127)
    tensors = {"weight": codes.to(torch.int8), "weight_scale": scales, "input_scale": torch.tensor([0.0625])}
    return tensors, codes * scales


def fp8_static(weight: Tensor) -> Stored:
    """AutoFP8: one scale per tensor, so that q, k and v differ."""
    scale = weight.abs().max() / 448
    codes = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(0.125)}, codes.float() * scale


def fp8_block(weight: Tensor) -> Stored:
    """Blocks of 48 x 48, ragged in these models; activations in groups of 48."""
    rows, columns = weight.shape
    scales = torch.empty(-(-rows // 48), -(-columns // 48))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            scales[i, j] = weight[48 * i : 48 * i + 48, 48 * j : 48 * j + 48].abs().max() / 448
    spread = scales.repeat_interleave(48, 0)[:rows].repeat_interleave(48, 1)[:, :columns]
    codes = (weight / spread).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale_inv": scales}, codes.float() * spread


def round_int8(x: Tensor) -> Tensor:
    return (x * 16).round().clamp(-128, 127) / 16


def round_fp8(x: Tensor) -> Tensor:
    return (x * 8).clamp(-448, 448).to(torch.float8_e4m3fn).float() / 8


def round_fp8_groups(x: Tensor) -> Tensor:
    parts = []
    for part in x.split(48, dim=-1):
        scale = part.abs().amax(-1, keepdim=True) / 448
        parts.append((part / scale).to(torch.float8_e4m3fn).float() * scale)
    return torch.cat(parts, -1)


def ct(weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    group = {
        "targets": ["Linear"],
        "weights": {"type": "int", "symmetric": True, **weights},
        "input_activations": inputs,
    }
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": ["lm_head"]}


INT8_STATIC = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "tensor", "dynamic": False}
FORMATS: dict[str, tuple[Callable[[Tensor], Stored], Callable[[Tensor], Tensor] | None, dict[str, Any]]] = {
    "awq": (awq, None, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}),
    "packed": (packed, None, ct({"num_bits": 8, "strategy": "group", "group_size": GROUP})),
    "int8": (int8, round_int8, ct({"num_bits": 8, "strategy": "channel"}, INT8_STATIC)),
    "fp8-static": (fp8_static, round_fp8, {"quant_method": "fp8", "activation_scheme": "static"}),
    "fp8-block": (
        fp8_block,
        round_fp8_groups,
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [48, 48]},
    ),
}


def write(
    directory: Path, source: Path, encode: Callable[[Tensor], Stored], config: dict[str, Any]
) -> dict[str, Tensor]:
    """A quantized copy of a model; returns the tensors of its dense twin."""
    stored, dense = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        dense[name], stored[name] = tensor, tensor
        if name.endswith("_proj.weight"):
            module = name.removesuffix(".weight")
            tensors, dense[name] = encode(tensor)
            del stored[name]
            stored |= {f"{module}.{part}": value.contiguous() for part, value in tensors.items()}
    directory.mkdir()
    for file in source.iterdir():
        if file.name not in ("model.safetensors", "config.json"):
            (directory / file.name).write_bytes(file.read_bytes())
    raw = json.loads((source / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**raw, "quantization_config": config}))
    save_file(stored, directory / "model.safetensors")
    return dense


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("base"), "llama-bias")


@pytest.mark.parametrize("name", FORMATS)
def test_logits(name: str, base: Path, tmp_path: Path) -> None:
    encode, round_input, config = FORMATS[name]
    dense = write(tmp_path / "model", base, encode, config)
    model = judge(base)
    model.load_state_dict(dense, strict=False)
    if round_input is not None:
        for module_name, module in model.named_modules():
            if module_name.endswith("_proj"):
                module.register_forward_pre_hook(lambda _, inputs: (round_input(inputs[0]),))
    expected = judge_logits(model, PROMPT)
    with LLM(str(tmp_path / "model"), device="cpu", dtype="float32") as llm:
        logits = llm.logits(PROMPT)
    errors = (logits - expected).norm(dim=1) / expected.norm(dim=1)
    if round_input is None:
        assert errors.max().item() < 1e-5
    else:
        assert errors.median().item() < 1e-3
        assert (logits.argmax(1) == expected.argmax(1)).float().mean().item() > 0.9


def test_a_scheme_without_a_kernel_is_refused_before_weights_are_read(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ct({"num_bits": 8, "strategy": "channel"}, {**INT8_STATIC, "strategy": "token"})
    write(tmp_path / "model", base, int8, config)
    read = []
    monkeypatch.setattr(
        "twofold.engine.weights.safetensors_dir.SafetensorsCheckpoint._read", lambda self, name: read.append(name)
    )
    with pytest.raises(UnsupportedError, match=r"layers\.0\.mlp\.down_proj: static activations per token.*served are"):
        LLM(str(tmp_path / "model"), device="cpu", dtype="float32")
    assert read == []


def test_strict_kernels_name_the_layer_and_the_scheme(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("twofold.kernels.cpu.small_floats.unavailable_for", lambda dtype: "no compiler")
    encode, _, config = FORMATS["fp8-block"]
    write(tmp_path / "model", base, encode, config)
    words = r"down_proj is fp8 48x48 a-fp8 g48 \(fp8\): --strict-kernels: .*emulated.*Leave the option out"
    with pytest.raises(UnsupportedError, match=words):
        LLM(str(tmp_path / "model"), device="cpu", dtype="float32", strict_kernels=True)


def test_a_missing_scale_is_found_before_weights_are_read(base: Path, tmp_path: Path) -> None:
    encode, _, config = FORMATS["fp8-static"]
    write(tmp_path / "model", base, encode, config)
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight_scale"]
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj\.weight.*neither weight_scale nor"):
        LLM(str(tmp_path / "model"), device="cpu", dtype="float32")


def test_cache_scales_are_reported(base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    encode, _, config = FORMATS["fp8-static"]
    write(tmp_path / "model", base, encode, config)
    file = tmp_path / "model" / "model.safetensors"
    extra = {f"model.layers.{layer}.self_attn.k_scale": torch.tensor(0.5) for layer in range(2)}
    save_file({**load_file(file), **extra}, file)
    with caplog.at_level(logging.INFO), LLM(str(tmp_path / "model"), device="cpu", dtype="float32"):
        pass
    assert "KV-cache scales for 2 layers, made for fp8; they are not used" in caplog.text
    assert "--kv-cache-dtype fp8 uses them" in caplog.text
