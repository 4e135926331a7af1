"""Fused layers as the loader builds them, run on inputs: scales per shard (B027), biases (B031), rules (B026)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import awq_oracle
import numpy as np
import pytest
import torch
from gptq_oracle import encode_linear
from paged_runner import load, logits_of
from safetensors.torch import load_file, save_file
from tiny_models import build_tiny_model, judge, judge_logits
from torch import Tensor
from twofold.engine.layers.linear import Linear
from twofold.engine.sources import ModelFiles
from twofold.engine.weights import open_checkpoint
from twofold.engine.weights.loader import Loader
from twofold.kernels.kernel_set import KernelSet
from twofold.platforms.cpu import CpuPlatform
from twofold.quant.formats import detect_format

COLUMNS = 64
ROWS = {"q_proj": 32, "k_proj": 16, "v_proj": 16}
PREFIX = "model.layers.0.self_attn."


def fused(folder: Path, tensors: Mapping[str, Tensor], config: dict[str, Any], *, bias: bool = False) -> Linear:
    """q, k and v of a folder as one layer; nothing in the folder may be left over."""
    folder.mkdir()
    save_file({PREFIX + name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    checkpoint = open_checkpoint(ModelFiles("m", folder, "directory"))
    layout, kernels = detect_format(config), KernelSet(CpuPlatform().spec)
    loader = Loader(checkpoint, layout, kernels, torch.float32, torch.device("cpu"))
    linear = loader.linear({PREFIX + name: rows for name, rows in ROWS.items()}, COLUMNS, bias=bias)
    assert checkpoint.unused() == []
    return linear


def inputs() -> Tensor:
    return torch.randn(7, COLUMNS, generator=torch.Generator().manual_seed(3))


def row_errors(actual: Tensor, expected: Tensor) -> Tensor:
    return (actual.double() - expected).norm(dim=1) / expected.norm(dim=1)


def fp8_shards(input_scales: tuple[float, float, float]) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Stored tensors; the product in float64, each shard by itself; the same with the largest scale for all codes."""
    tensors, apart, wrong, x = {}, [], [], inputs().double()
    for seed, (name, factor, step) in enumerate(zip(ROWS, (0.01, 0.0025, 0.04), input_scales, strict=True)):
        values = torch.randn(ROWS[name], COLUMNS, generator=torch.Generator().manual_seed(seed)) * 20
        codes = values.to(torch.float8_e4m3fn)
        tensors |= {f"{name}.weight": codes, f"{name}.weight_scale": torch.tensor(factor)}
        tensors[f"{name}.input_scale"] = torch.tensor(step)
        rounded = (x / step).clamp(-448, 448).to(torch.float8_e4m3fn).double() * step
        apart.append(rounded @ (codes.double() * factor).T)
        wrong.append(rounded @ (codes.double() * 0.04).T)
    return tensors, torch.cat(apart, dim=1), torch.cat(wrong, dim=1)


@pytest.mark.parametrize("input_scales", [(0.01, 0.01, 0.01), (0.01, 0.02, 0.005)])
def test_b027_fused_fp8_shards_equal_the_layers_by_themselves(
    tmp_path: Path, input_scales: tuple[float, float, float]
) -> None:
    """Ours keeps every scale, of inputs too; one product with the largest weight scale is what this must catch."""
    tensors, expected, wrong = fp8_shards(input_scales)
    config = {"quant_method": "fp8", "activation_scheme": "static"}
    result = fused(tmp_path / "m", tensors, config)(inputs())
    assert row_errors(result, expected).max() < 1e-5
    assert row_errors(result, wrong).min() > 0.03


def integers(kind: str) -> tuple[dict[str, Tensor], Tensor, dict[str, Any]]:
    """Stored tensors of q, k and v, their stacked matrix in float64, and the config."""
    random, tensors, matrices = np.random.default_rng(1), {}, []
    for name, rows in ROWS.items():
        codes, zeros = random.integers(0, 16, (rows, COLUMNS)), random.integers(1, 16, (rows, 2))
        scales = random.uniform(0.01, 0.1, (rows, 2)).astype(np.float16)
        matrices.append((codes - zeros.repeat(32, 1)) * scales.astype(np.float64).repeat(32, 1))
        if kind == "awq":
            stored = awq_oracle.encode("gemm", codes, zeros, scales, 32)
        else:
            stored = encode_linear(codes.T, zeros.T, scales.T.copy(), np.arange(COLUMNS) // 32, 4, 1)
        tensors |= {f"{name}.{part}": tensor for part, tensor in stored.items()}
    configs: dict[str, dict[str, Any]] = {
        "awq": {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
        "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False},
    }
    return tensors, torch.from_numpy(np.concatenate(matrices)), configs[kind]


@pytest.mark.parametrize("kind", ["awq", "gptq"])
@pytest.mark.parametrize("declared", [False, True])
def test_b031_biases_of_fused_quantized_layers(tmp_path: Path, kind: str, declared: bool) -> None:
    tensors, matrix, config = integers(kind)
    x, biases = inputs(), {f"{name}.bias": torch.randn(rows).half() for name, rows in ROWS.items()}
    absent = fused(tmp_path / "a", tensors, config, bias=declared)(x)
    zero = fused(tmp_path / "b", {**tensors, **{n: torch.zeros_like(b) for n, b in biases.items()}}, config)(x)
    assert torch.equal(absent, zero)
    torch.testing.assert_close(absent.double(), x.double() @ matrix.T, atol=1e-4, rtol=0)
    real = fused(tmp_path / "c", {**tensors, **biases}, config, bias=declared)(x)
    added = x.double() @ matrix.T + torch.cat(list(biases.values())).double()
    torch.testing.assert_close(real.double(), added, atol=1e-4, rtol=0)
    only_k = fused(tmp_path / "d", {**tensors, "k_proj.bias": biases["k_proj.bias"]}, config, bias=declared)(x)
    assert torch.equal(only_k[:, 32:48], real[:, 32:48])
    assert torch.equal(only_k[:, :32], absent[:, :32]) and torch.equal(only_k[:, 48:], absent[:, 48:])


RULES = {"+:.*layers\\.1\\..*": {"bits": 8, "group_size": 64}, "-:.*o_proj": {}}


def rounded(weight: Tensor, bits: int, group_size: int) -> tuple[dict[str, Tensor], Tensor]:
    """GPTQ tensors, symmetric, and the matrix they stand for."""
    group = np.arange(weight.shape[1]) // group_size
    values, groups = weight.T.double().numpy(), group[-1] + 1
    middle = 2 ** (bits - 1)
    scales = np.stack([np.abs(values[group == g]).max(axis=0) / (middle - 1) for g in range(groups)]).astype(np.float16)
    spread = scales.astype(np.float64)[group]
    codes = np.clip(np.round(values / spread) + middle, 0, 2 * middle - 1).astype(np.int64)
    stored = encode_linear(codes, np.full_like(scales, middle, dtype=np.int64), scales, group, bits, 1)
    return stored, torch.from_numpy(((codes - middle) * spread).T).float()


def test_b026_a_quantized_head_and_rules_per_module(tmp_path: Path) -> None:
    """Layer 1 in 8 bits and groups of 64, layer 0's o_proj plain (the first rule that matches wins), the head in 4."""
    base, ours = tmp_path / "base", tmp_path / "gptq"
    build_tiny_model(base, "llama")
    ours.mkdir()
    tensors, dense, bits_of = {}, {}, {}
    for name, tensor in load_file(base / "model.safetensors").items():
        module = name.removesuffix(".weight")
        linear = tensor.dim() == 2 and "embed_tokens" not in name
        bits, size = (8, 64) if "layers.1." in name else (4, 32)
        if not linear or module == "model.layers.0.self_attn.o_proj":
            tensors[name] = dense[name] = tensor
            continue
        stored, dense[name] = rounded(tensor, bits, size)
        tensors |= {f"{module}.{part}": each for part, each in stored.items()}
        bits_of[module] = bits
    assert {bits_of["lm_head"], bits_of["model.layers.1.self_attn.o_proj"]} == {4, 8}
    save_file(tensors, ours / "model.safetensors")
    quantization = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
    raw = json.loads((base / "config.json").read_text())
    raw["quantization_config"] = {**quantization, "lm_head": True, "dynamic": RULES}
    (ours / "config.json").write_text(json.dumps(raw))
    model, tokens = judge(base), list(range(3, 40))
    model.load_state_dict(dense, strict=False)
    torch.testing.assert_close(logits_of(load(ours), tokens), judge_logits(model, tokens), atol=1e-4, rtol=0)
