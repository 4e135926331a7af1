"""Tensors that contradict the config, or have no meaning, are refused: from headers where names and types show it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from stored_tensors import StoredTensors
from twofold.errors import CheckpointError, UnsupportedError
from twofold.quant.canonical import DenseWeight
from twofold.quant.formats import detect_format

FP8 = torch.float8_e4m3fn


def compressed(weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}


INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
TOKENS = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
QUARK = {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "int8", "qscheme": "per_tensor"}}}


def eight_bit(dtype: torch.dtype) -> StoredTensors:
    codes = torch.ones(8, 32).to(dtype)
    return StoredTensors({"m.weight": codes, "m.weight_scale": torch.ones(8, 1)})


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        (compressed(INT8), FP8),
        (compressed({**INT8, "num_bits": 4}), FP8),
        (compressed(INT8, TOKENS), FP8),
        (compressed({**INT8, "num_bits": 4}, TOKENS), FP8),
        (compressed(INT8), torch.int32),
        (compressed(FLOAT8), torch.int8),
        (QUARK, FP8),
    ],
)
def test_codes_of_another_type(config: dict[str, Any], dtype: torch.dtype) -> None:
    source, layout = eight_bit(dtype), detect_format(config)
    for read in (lambda: layout.check(source), lambda: layout.load(source, "m", torch.float32)):
        with pytest.raises(UnsupportedError, match=rf"m\.weight in .* is stored as {dtype}; the config says .*config"):
            read()


def test_int32_words_against_eight_bit_floats() -> None:
    source = StoredTensors(
        {"m.weight_packed": torch.zeros(8, 8, dtype=torch.int32), "m.weight_scale": torch.ones(8, 1)}
    )
    with pytest.raises(CheckpointError, match=r"m\.weight is missing"):
        detect_format(compressed(FLOAT8)).check(source)


def gptq(desc_act: bool) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": desc_act, "sym": True}
    tensors = {
        "m.qweight": torch.zeros(8, 16, dtype=torch.int32),
        "m.qzeros": torch.full((2, 2), 0x77777777, dtype=torch.int32),
        "m.scales": torch.ones(2, 16),
        "m.g_idx": torch.arange(64, dtype=torch.int32) // 32,
    }
    return config, tensors


@pytest.mark.parametrize("part", ["qweight", "scales", "g_idx"])
def test_parts_of_another_type(part: str) -> None:
    config, tensors = gptq(desc_act=True)
    detect_format(config).check(StoredTensors(tensors))
    other = torch.int8 if part == "scales" else torch.float32
    tensors[f"m.{part}"] = tensors[f"m.{part}"].to(other)
    with pytest.raises(CheckpointError, match=rf"m\.{part} in .* is stored as {other}; it must be one of"):
        detect_format(config).check(StoredTensors(tensors))


def test_act_order_needs_its_index() -> None:
    config, tensors = gptq(desc_act=True)
    del tensors["m.g_idx"]
    with pytest.raises(CheckpointError, match=r"m\.g_idx is missing from .*desc_act: true"):
        detect_format(config).check(StoredTensors(tensors))
    assert detect_format({**config, "desc_act": False}).check(StoredTensors(tensors))[0][0] == "m"


@pytest.mark.parametrize("inputs", [None, TOKENS])
def test_asymmetric_weights_need_their_zero_points(inputs: dict[str, Any] | None) -> None:
    layout, source = detect_format(compressed({**INT8, "symmetric": False}, inputs)), eight_bit(torch.int8)
    for read in (lambda: layout.check(source), lambda: layout.load(source, "m", torch.float32)):
        with pytest.raises(CheckpointError, match=r"m\.weight_zero_point is missing .*symmetric: false.*Fetch"):
            read()


@pytest.mark.parametrize(
    ("weights", "dtype", "scale"), [(INT8, torch.int8, 0.0), (FLOAT8, FP8, 0.0), (FLOAT8, FP8, -0.5)]
)
def test_scales_that_wipe_weights_out(weights: dict[str, Any], dtype: torch.dtype, scale: float) -> None:
    inputs = TOKENS if weights is INT8 else {**TOKENS, "type": "float"}
    source = eight_bit(dtype)
    source.tensors["m.weight_scale"][3] = scale
    with pytest.raises(CheckpointError, match=rf"m: a weight scale is {scale:g}; it must be above 0"):
        detect_format(compressed(weights, inputs)).load(source, "m", torch.float32)


def test_a_dead_row_may_have_a_scale_of_zero() -> None:
    source = eight_bit(FP8)
    source.tensors["m.weight_scale"][3] = 0.0
    source.tensors["m.weight"][3] = torch.tensor(-0.0).to(FP8)
    inputs = {**TOKENS, "type": "float"}
    weight = detect_format(compressed(FLOAT8, inputs)).load(source, "m", torch.float32)
    assert not isinstance(weight, DenseWeight) and weight.shape == (8, 32)
