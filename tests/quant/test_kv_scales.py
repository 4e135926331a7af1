"""KV-cache scales under every name in use (B028)."""

from __future__ import annotations

import logging

import pytest
import torch
from stored_tensors import StoredTensors
from twofold.errors import CheckpointError
from twofold.quant.kv_scales import KVScales, describe_kv_scales, read_kv_scales

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
    ],
)
def test_names(k: str, v: str) -> None:
    assert read_kv_scales(source(**{k: 0.5, v: 0.25})) == {3: KVScales(0.5, 0.25)}


def test_the_legacy_scale_serves_both() -> None:
    assert read_kv_scales(source(kv_scale=0.5)) == {3: KVScales(0.5, 0.5)}
    assert read_kv_scales(source(kv_scale=0.5, v_scale=0.25)) == {3: KVScales(0.5, 0.25)}
    assert read_kv_scales(source(kv_scale=0.5, k_scale=2.0)) == {3: KVScales(2.0, 0.5)}


def test_only_one_of_the_two(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert read_kv_scales(source(v_scale=0.25)) == {3: KVScales(1.0, 0.25)}
    assert "layer 3" in caplog.text and "k counts as 1" in caplog.text


def test_scalar_shapes_and_other_tensors() -> None:
    scalar = StoredTensors({f"{LAYER}.k_scale": torch.tensor(0.5), f"{LAYER}.q_proj.weight_scale": torch.ones(4)})
    assert read_kv_scales(scalar) == {3: KVScales(0.5, 1.0)}
    assert read_kv_scales(StoredTensors({})) == {}


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_impossible_scales_are_named(value: float) -> None:
    with pytest.raises(CheckpointError, match=r"self_attn\.k_scale"):
        read_kv_scales(source(k_scale=value))


def test_names_that_disagree() -> None:
    with pytest.raises(CheckpointError, match=r"k_proj\.k_scale.*which of them"):
        read_kv_scales(source(k_scale=0.5, k_proj__k_scale=0.25))


def test_the_report() -> None:
    text = describe_kv_scales({0: KVScales(0.5, 0.25), 1: KVScales(0.75, 0.25)})
    assert "2 layers" in text and "0.5 to 0.75" in text and "not quantized unless asked" in text
