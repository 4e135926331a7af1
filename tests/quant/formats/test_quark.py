"""AMD Quark: its layouts against their definition, and which module gets which scheme."""

from __future__ import annotations

from typing import Any

import awq_oracle
import numpy as np
import pytest
import torch
from stored_tensors import StoredTensors
from twofold.errors import UnsupportedError
from twofold.quant.canonical import EightBitWeight, dequantize
from twofold.quant.formats import detect_format


def config(weight: dict[str, Any], inputs: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return {
        "quant_method": "quark",
        "global_quant_config": {"weight": weight, "input_tensors": inputs},
        "layer_quant_config": {},
        "exclude": ["lm_head"],
        "export": {"pack_method": "reorder", "weight_format": "real_quantized"},
        **more,
    }


def tensors_of(dtype: str, qscheme: str = "per_tensor", dynamic: bool = False, **more: Any) -> dict[str, Any]:
    return {"dtype": dtype, "qscheme": qscheme, "is_dynamic": dynamic, "symmetric": True, **more}


@pytest.mark.parametrize("pack_method", ["reorder", "order"])
@pytest.mark.parametrize("dtype", ["int4", "uint4"])
def test_four_bits(dtype: str, pack_method: str) -> None:
    random = np.random.default_rng(3)
    signed = dtype == "int4"
    low = -8 if signed else 0
    codes, zeros = random.integers(low, low + 16, (64, 32)), random.integers(low, low + 16, (2, 32))
    scales = 2.0 ** random.integers(-5, 0, (2, 32))
    words = awq_oracle.gemm_words if pack_method == "reorder" else lambda values: awq_oracle.plain_words(values, 4)
    source = StoredTensors(
        {
            "m.weight": words(codes & 15),
            "m.weight_zero_point": words(zeros & 15),
            "m.weight_scale": torch.from_numpy(scales).to(torch.bfloat16),
        }
    )
    raw = config(tensors_of(dtype, "per_group", group_size=32), export={"pack_method": pack_method})
    layout = detect_format(raw)
    expected = (codes - zeros.repeat(32, 0)) * scales.repeat(32, 0)
    assert torch.equal(dequantize(layout.load(source, "m", torch.float32)).double(), torch.from_numpy(expected.T))
    assert layout.check(source)[0][2] == (32, 64)


def test_int8_with_zero_points() -> None:
    codes = torch.randint(-128, 128, (8, 16), dtype=torch.int8)
    source = StoredTensors(
        {
            "m.weight": codes,
            "m.weight_scale": torch.tensor(0.5),
            "m.weight_zero_point": torch.tensor(3, dtype=torch.int8),
            "m.input_scale": torch.tensor(0.25),
            "m.input_zero_point": torch.tensor(0, dtype=torch.int8),
        }
    )
    weight = detect_format(config(tensors_of("int8"), tensors_of("int8"))).load(source, "m", torch.float32)
    assert isinstance(weight, EightBitWeight) and str(weight.scheme) == "int8 tensor asym a8 tensor static"
    assert torch.equal(dequantize(weight), (codes.float() - 3) * 0.5)
    weight_only = detect_format(config(tensors_of("int8"))).load(source, "m", torch.float32)
    assert str(weight_only.scheme) == "w8 channel asym" and torch.equal(dequantize(weight_only), dequantize(weight))


def test_fp8_per_channel_and_token() -> None:
    codes, scales = torch.randn(8, 16).to(torch.float8_e4m3fn), torch.rand(8, dtype=torch.bfloat16)
    inputs = tensors_of("fp8_e4m3", "per_channel", dynamic=True, ch_axis=1)
    layout = detect_format(config(tensors_of("fp8_e4m3", "per_channel", ch_axis=0), inputs))
    weight = layout.load(StoredTensors({"m.weight": codes, "m.weight_scale": scales}), "m", torch.float32)
    assert str(weight.scheme) == "fp8 channel a-fp8 token"
    assert torch.equal(dequantize(weight), codes.float() * scales.float()[:, None])


def test_microscaled_fp4() -> None:
    spec = tensors_of("fp4", "per_group", group_size=32, scale_format="e8m0")
    layout = detect_format(config(spec, {**spec, "is_dynamic": True}))
    source = StoredTensors(
        {
            "m.weight": torch.full((4, 32), 0x21, dtype=torch.uint8),
            "m.weight_scale": torch.full((4, 2), 128, dtype=torch.uint8),
        }
    )
    weight = layout.load(source, "m", torch.float32)
    assert str(weight.scheme) == "mxfp4 g32 a-mxfp4 g32"
    assert dequantize(weight)[0, :4].tolist() == [1.0, 2.0, 1.0, 2.0]


def test_overrides_and_exclusions_by_pattern() -> None:
    override = {"weight": tensors_of("int8"), "input_tensors": None}
    raw = config(tensors_of("fp8_e4m3"), tensors_of("fp8_e4m3"), layer_quant_config={"*k_proj": override})
    layout = detect_format({**raw, "exclude": ["lm_head", "*.mlp.*"]})
    names = ("layers.0.self_attn.q_proj", "layers.0.self_attn.k_proj", "layers.0.mlp.up_proj", "lm_head")
    assert [str(layout.scheme(name)) for name in names] == [
        "fp8 tensor a-fp8 tensor static",
        "w8 channel sym",
        "dense",
        "dense",
    ]


def test_what_is_not_served_is_named() -> None:
    with pytest.raises(UnsupportedError, match="fake_quantized"):
        detect_format(config(tensors_of("int8"), export={"weight_format": "fake_quantized"}))
    source = StoredTensors({"m.weight": torch.zeros(4, 8, dtype=torch.uint8), "m.weight_scale": torch.ones(1)})
    for weight, inputs in (
        (tensors_of("int3", "per_group"), None),
        (tensors_of("int8"), tensors_of("fp8_e4m3")),
        (tensors_of("fp8_e4m3"), tensors_of("fp8_e4m3", "per_channel", dynamic=True, ch_axis=0)),
    ):
        with pytest.raises(UnsupportedError, match=r"^m: quark .*served are"):
            detect_format(config(weight, inputs)).check(source)
