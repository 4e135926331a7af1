"""quant_method fp8: both families, scales per shard and per block (B027, B029, B030), and what writers get wrong."""

from __future__ import annotations

import pytest
import torch
from stored_tensors import StoredTensors
from twofold.errors import CheckpointError, ConfigError, UnsupportedError
from twofold.quant.canonical import CanonicalWeight, EightBitWeight, dequantize, merge
from twofold.quant.formats import detect_format

BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
STATIC = {
    "quant_method": "fp8",
    "activation_scheme": "static",
    "ignored_layers": ["lm_head", "model.layers.0.mlp.gate"],
}


def codes(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).to(torch.float8_e4m3fn)


def by_block(values: torch.Tensor, scales: torch.Tensor, size: int = 128) -> torch.Tensor:
    """``W[n, k] = code * scale[n // size, k // size]``, with plain indexing."""
    rows, columns = torch.arange(values.shape[0]) // size, torch.arange(values.shape[1]) // size
    return values.float() * scales.float()[rows][:, columns]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
def test_ragged_blocks(dtype: torch.dtype) -> None:
    """B029: 576 x 200 has 5 x 2 blocks."""
    scales = (2.0 ** torch.arange(-5, 5).reshape(5, 2)).to(dtype)
    source = StoredTensors({"m.weight": codes(576, 200), "m.weight_scale_inv": scales})
    weight = detect_format(BLOCKS).load(source, "m", torch.float32)
    assert str(weight.scheme) == "fp8 128x128 a-fp8 g128"
    assert torch.equal(dequantize(weight), by_block(codes(576, 200), scales))


def test_fused_blocks_keep_each_parts_own_grid() -> None:
    """B029: 192 rows are one block and a half; the second part's first block starts at its own first row."""
    parts, expected = [], []
    for seed in (0, 1):
        scales = torch.rand(2, 2, generator=torch.Generator().manual_seed(seed))
        source = StoredTensors({"m.weight": codes(192, 200, seed), "m.weight_scale_inv": scales})
        parts.append(detect_format(BLOCKS).load(source, "m", torch.float32))
        expected.append(by_block(codes(192, 200, seed), scales))
    (merged,) = merge(parts)
    assert merged.shape == (384, 200) and torch.equal(dequantize(merged), torch.cat(expected))


def shard(scale: float, input_scale: float, seed: int) -> CanonicalWeight:
    source = StoredTensors(
        {
            "m.weight": codes(16, 64, seed),
            "m.weight_scale": torch.tensor(scale),
            "m.input_scale": torch.tensor([input_scale]),
        }
    )
    return detect_format(STATIC).load(source, "m", torch.float32)


def test_fused_shards_keep_their_scales() -> None:
    """B027: exact where the scales are kept; the largest alone would be off by up to 16 times."""
    parts = [shard(scale, 0.5, seed) for seed, scale in enumerate((0.01, 0.0025, 0.04))]
    (merged,) = merge(parts)
    assert str(merged.scheme) == "fp8 channel a-fp8 tensor static"
    expected = torch.cat([codes(16, 64, seed).float() * scale for seed, scale in enumerate((0.01, 0.0025, 0.04))])
    assert torch.equal(dequantize(merged), expected)
    (same,) = merge([shard(0.01, 0.5, 0), shard(0.01, 0.5, 1)])
    assert str(same.scheme) == "fp8 tensor a-fp8 tensor static"


def test_shards_with_different_input_scales_are_not_fused() -> None:
    """B027, B030: one input scale for all would clip one shard or waste the other's range."""
    parts = [shard(0.01, 0.5, 0), shard(0.01, 0.25, 1)]
    assert merge(parts) == parts


def test_experts_keep_their_own_scales() -> None:
    """B030: every expert is read with its own weight and input scales."""
    tensors = {}
    for expert, scale in enumerate((1.0, 2.0, 0.5, 4.0)):
        for name in ("w1", "w3"):
            module = f"model.layers.0.block_sparse_moe.experts.{expert}.{name}"
            tensors[f"{module}.weight"] = codes(16, 64, expert)
            tensors[f"{module}.weight_scale"] = torch.tensor(scale * (2 if name == "w3" else 1))
            tensors[f"{module}.input_scale"] = torch.tensor(scale * 1e-2)
    source, layout = StoredTensors(tensors), detect_format(STATIC)
    for expert, scale in enumerate((1.0, 2.0, 0.5, 4.0)):
        prefix = f"model.layers.0.block_sparse_moe.experts.{expert}"
        (merged,) = merge([layout.load(source, f"{prefix}.{name}", torch.float32) for name in ("w1", "w3")])
        assert isinstance(merged, EightBitWeight) and merged.input_scale is not None
        assert merged.input_scale.item() == pytest.approx(scale * 1e-2)
        assert torch.equal(merged.dequantize()[16:], codes(16, 64, expert).float() * scale * 2)


def test_packed_scales_of_experts() -> None:
    experts, inner, hidden = 3, 192, 256
    gate_up, down = torch.rand(experts, 4, 2), torch.rand(experts, 2, 2)
    prefix = "model.layers.0.mlp.experts"
    tensors = {f"{prefix}.gate_up_proj_scale_inv": gate_up, f"{prefix}.down_proj_scale_inv": down}
    for expert in range(experts):
        for name, shape in (
            ("gate_proj", (inner, hidden)),
            ("up_proj", (inner, hidden)),
            ("down_proj", (hidden, inner)),
        ):
            tensors[f"{prefix}.{expert}.{name}.weight"] = codes(*shape, seed=expert)
    source, layout = StoredTensors(tensors), detect_format(BLOCKS)
    for expert in range(experts):
        for name, scales in (
            ("gate_proj", gate_up[expert, :2]),
            ("up_proj", gate_up[expert, 2:]),
            ("down_proj", down[expert]),
        ):
            module = f"{prefix}.{expert}.{name}"
            expected = by_block(tensors[f"{module}.weight"], scales)
            assert torch.equal(dequantize(layout.load(source, module, torch.float32)), expected)
    assert len(layout.check(source)) == 9
    tensors[f"{prefix}.down_proj_scale_inv"] = torch.rand(experts, 1, 2)
    with pytest.raises(CheckpointError, match="down_proj_scale_inv"):
        layout.check(StoredTensors(tensors))


def test_scales_beside_a_16_bit_weight_are_ignored() -> None:
    plain = torch.randn(64, 128, dtype=torch.bfloat16)
    source = StoredTensors({"m.weight": plain, "m.weight_scale_inv": torch.full((1, 1), 8.5e15)})
    layout = detect_format(BLOCKS)
    assert torch.equal(dequantize(layout.load(source, "m", torch.float32)), plain.float())
    assert str(layout.check(source)[0][1]) == "dense" and set(source.taken) == set(source.names)


def test_what_a_config_leaves_out() -> None:
    layout = detect_format({**BLOCKS, "modules_to_not_convert": ["down_proj", "re:.*layers\\.1\\..*"]})
    names = ("model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj", "model.layers.1.mlp.up_proj", "lm_head")
    assert [str(layout.scheme(name)) for name in names] == ["fp8 128x128 a-fp8 g128", "dense", "dense", "dense"]
    assert str(detect_format(STATIC).scheme("model.layers.0.mlp.gate")) == "dense"
    assert str(detect_format(STATIC).scheme("model.layers.0.mlp.gate_proj")) == "fp8 tensor a-fp8 tensor static"


def test_dynamic_per_tensor_is_served_per_token() -> None:
    assert str(detect_format({"quant_method": "fp8"}).scheme("m")) == "fp8 tensor a-fp8 token"


@pytest.mark.parametrize("nested", [False, True])
def test_modelopt(nested: bool) -> None:
    inner = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head", "*.mlp.gate"]}
    side_file = {"producer": {"name": "modelopt", "version": "0.19"}, "quantization": inner}
    layout = detect_format(side_file if nested else {"quant_method": "modelopt", **inner})
    assert str(layout.scheme("model.layers.0.mlp.up_proj")) == "fp8 tensor a-fp8 tensor static"
    assert str(layout.scheme("model.layers.0.mlp.gate")) == str(layout.scheme("lm_head")) == "dense"
    with pytest.raises(UnsupportedError, match=r"INT4_AWQ.*FP8, FP8_PER_CHANNEL_PER_TOKEN"):
        detect_format({"quant_method": "modelopt", "quant_algo": "INT4_AWQ"})


def test_fbgemm() -> None:
    layout = detect_format(
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["o_proj"]}
    )
    source = StoredTensors({"m.weight": codes(16, 64), "m.weight_scale": torch.rand(16, 1)})
    weight = layout.load(source, "m", torch.float32)
    assert str(weight.scheme) == "fp8 channel a-fp8 token"
    assert torch.equal(dequantize(weight), codes(16, 64).float() * source.tensors["m.weight_scale"])


def test_damage_and_wrong_configs_are_named() -> None:
    with pytest.raises(CheckpointError, match=r"m\.weight.*neither weight_scale nor weight_scale_inv"):
        detect_format(BLOCKS).check(StoredTensors({"m.weight": codes(8, 8)}))
    with pytest.raises(CheckpointError, match=r"m\.input_scale is missing"):
        detect_format(STATIC).check(StoredTensors({"m.weight": codes(8, 8), "m.weight_scale": torch.tensor(1.0)}))
    with pytest.raises(UnsupportedError, match="float8_e5m2"):
        wrong = {"m.weight": torch.zeros(8, 8).to(torch.float8_e5m2), "m.weight_scale": torch.tensor(1.0)}
        detect_format(STATIC).check(StoredTensors(wrong))
    with pytest.raises(ConfigError, match="weight_block_size"):
        detect_format({**BLOCKS, "weight_block_size": 128})
    with pytest.raises(ConfigError, match="activation_scheme 'some'"):
        detect_format({**BLOCKS, "activation_scheme": "some"})
    with pytest.raises(UnsupportedError, match="e5m2"):
        detect_format({**BLOCKS, "fmt": "e5m2"})
    with pytest.raises(UnsupportedError, match="embed_tokens"):
        embedding = {"model.embed_tokens.weight": codes(8, 8), "model.embed_tokens.weight_scale": torch.tensor(1.0)}
        detect_format(BLOCKS).check(StoredTensors(embedding))
