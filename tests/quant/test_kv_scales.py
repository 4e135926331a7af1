"""KV-cache scales under every name in use (B028)."""

from __future__ import annotations

import pytest
import torch
from stored_tensors import StoredTensors
from twofold.errors import CheckpointError
from twofold.quant.kv_scales import (
    KVScales,
    calibrated_for,
    describe_kv_scales,
    is_kv_scale,
    read_kv_scales,
    scaled_layers,
    why_unused,
)

LAYER = "model.layers.3.self_attn"


def source(**values: float) -> StoredTensors:
    return StoredTensors(
        {f"{LAYER}.{name.replace('__', '.')}": torch.tensor([v], dtype=torch.bfloat16) for name, v in values.items()}
    )


@pytest.mark.parametrize(
    ("k", "v"),
    [
        ("k_scale", "v_scale"),
        ("k_proj__k_scale", "v_proj__v_scale"),
        ("qkv_proj__k_scale", "qkv_proj__v_scale"),
        ("attn__k_scale", "attn__v_scale"),
        ("k_proj__output_scale", "v_proj__output_scale"),
        ("k_cache_scale", "v_cache_scale"),
        ("k_cache__scale", "v_cache__scale"),
    ],
)
def test_names(k: str, v: str) -> None:
    assert read_kv_scales(source(**{k: 0.5, v: 0.25})) == {3: KVScales(0.5, 0.25)}


def test_the_legacy_scale_serves_both() -> None:
    assert read_kv_scales(source(kv_scale=0.5)) == {3: KVScales(0.5, 0.5)}
    assert read_kv_scales(source(kv_scale=0.5, v_scale=0.25)) == {3: KVScales(0.5, 0.25)}
    assert read_kv_scales(source(kv_scale=0.5, k_scale=2.0)) == {3: KVScales(2.0, 0.5)}


def test_only_one_of_the_two() -> None:
    for side, other in (("k", "v"), ("v", "k")):
        with pytest.raises(CheckpointError, match=rf"layer 3 has .*{side}_scale in .* but no {other} scale.*fetch"):
            read_kv_scales(source(**{f"{side}_scale": 0.25}))


def test_scalar_shapes_and_other_tensors() -> None:
    scalar = StoredTensors(
        {
            f"{LAYER}.k_scale": torch.tensor(0.5),
            f"{LAYER}.v_scale": torch.ones(1, 1),
            f"{LAYER}.q_proj.weight_scale": torch.ones(4),
        }
    )
    assert read_kv_scales(scalar) == {3: KVScales(0.5, 1.0)}
    assert read_kv_scales(StoredTensors({})) == {}


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_impossible_scales_are_named(value: float) -> None:
    with pytest.raises(CheckpointError, match=r"self_attn\.k_scale"):
        read_kv_scales(source(k_scale=value, v_scale=1.0))


def test_names_that_disagree() -> None:
    with pytest.raises(CheckpointError, match=r"k_proj\.k_scale.*which of them"):
        read_kv_scales(source(k_scale=0.5, k_proj__k_scale=0.25, v_scale=1.0))


def test_the_report() -> None:
    text = describe_kv_scales({0: KVScales(0.5, 0.25), 1: KVScales((0.75, 0.125), 0.25)})
    assert "2 layers" in text and "keys 0.125 to 0.75" in text and "values 0.25 to 0.25" in text
    assert "not quantized unless asked for: --kv-cache-dtype fp8 uses them" in why_unused(2, "fp8", "auto")
    assert "made for fp8; int8 does not use them" in why_unused(2, "fp8", "int8")


def test_one_scale_per_head() -> None:
    heads = StoredTensors(
        {f"{LAYER}.k_scale": torch.tensor([[0.5], [0.25]]), f"{LAYER}.v_scale": torch.tensor([0.5, 0.5])}
    )
    scales = read_kv_scales(heads)[3]
    assert scales == KVScales((0.5, 0.25), 0.5)
    key, value = scales.tensors(torch.float8_e4m3fn, 2, 3)
    assert key.tolist() == [0.5, 0.25] and value.tolist() == 0.5
    with pytest.raises(CheckpointError, match=r"layer 3 has 2 k scales.*its 4 KV heads"):
        scales.tensors(torch.float8_e4m3fn, 4, 3)
    with pytest.raises(CheckpointError, match=r"k_scale"):
        read_kv_scales(StoredTensors({f"{LAYER}.k_scale": torch.tensor([0.5, 0.0])}))


def test_scales_double_where_a_code_means_half() -> None:
    codes = torch.arange(1, 0x78, dtype=torch.uint8)
    plain, _ = KVScales(0.5, 0.25).tensors(torch.float8_e4m3fn, 2, 0)
    doubled, _ = KVScales(0.5, 0.25).tensors(torch.float8_e4m3fnuz, 2, 0)
    same = codes.view(torch.float8_e4m3fn).float() * plain
    assert torch.equal(codes.view(torch.float8_e4m3fnuz).float() * doubled, same)


def test_what_scales_were_made_for() -> None:
    assert calibrated_for(None) == calibrated_for({"kv_cache_scheme": "static"}) == "fp8"
    assert calibrated_for({"kv_cache_scheme": {"type": "float", "num_bits": 8}}) == "fp8"
    assert calibrated_for({"kv_cache_scheme": {"type": "int", "num_bits": 8}}) == "int8"
    quark = {"*k_proj": {"output_tensors": {"dtype": "int8"}}, "*v_proj": {"output_tensors": {"dtype": "int8"}}}
    assert calibrated_for({"kv_cache_quant_config": quark}) == "int8"
    assert calibrated_for({"kv_cache_quant_config": {"*k_proj": {"output_tensors": {"dtype": "fp8_e4m3"}}}}) == "fp8"


def test_layers_with_scales_are_known_from_names() -> None:
    assert scaled_layers(source(k_scale=0.5, q_proj__weight_scale=2.0)) == [3]
    assert scaled_layers(source(q_proj__weight_scale=2.0, q_scale=1.0)) == []
    assert is_kv_scale(f"{LAYER}.kv_scale") and not is_kv_scale(f"{LAYER}.k_proj.weight_scale")
