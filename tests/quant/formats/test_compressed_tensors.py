"""compressed-tensors: every layout against its definition, which module gets which scheme, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gptq_oracle import write_stream
from stored_tensors import StoredTensors
from twofold.errors import CheckpointError, UnsupportedError
from twofold.quant.canonical import EightBitWeight, MicroScaledWeight, PackedWeight, dequantize
from twofold.quant.formats import detect_format
from twofold.quant.scheme import Activation, Element, Int8

ROWS, COLUMNS = 24, 96
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def config(weights: dict[str, Any], inputs: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": ["lm_head"], **more}


def integers(bits: int, group: int | None, **more: Any) -> dict[str, Any]:
    strategy = "channel" if group is None else "group"
    return {"num_bits": bits, "type": "int", "symmetric": True, "strategy": strategy, "group_size": group, **more}


def floats(bits: int, strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": "float", "symmetric": True, "strategy": strategy, **more}


def stored(**tensors: Any) -> StoredTensors:
    return StoredTensors({f"m.{name}": torch.as_tensor(tensor) for name, tensor in tensors.items()})


def int_weight(bits: int, groups: int, asymmetric: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Signed codes [N, K], zeros and scales [N, G]; scales are exact in bfloat16."""
    random = np.random.default_rng(bits)
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1)
    zeros = random.integers(low, high, (ROWS, groups)) * asymmetric
    return random.integers(low, high, (ROWS, COLUMNS)), zeros, 2.0 ** random.integers(-6, 0, (ROWS, groups))


def packed_tensors(codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray, bits: int, asym: bool) -> dict[str, Any]:
    half = 2 ** (bits - 1)
    tensors = {
        "weight_packed": torch.tensor([write_stream((row + half).tolist(), bits) for row in codes], dtype=torch.int32),
        "weight_scale": torch.from_numpy(scales).to(torch.bfloat16),
        "weight_shape": torch.tensor([ROWS, COLUMNS]),
    }
    if asym:
        columns = [write_stream((column + half).tolist(), bits) for column in zeros.T]
        tensors["weight_zero_point"] = torch.tensor(columns, dtype=torch.int32).T.contiguous()
    return tensors


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("group", [None, 32])
@pytest.mark.parametrize("asymmetric", [False, True])
def test_pack_quantized(bits: int, group: int | None, asymmetric: bool) -> None:
    codes, zeros, scales = int_weight(bits, 1 if group is None else COLUMNS // group, asymmetric)
    source = stored(**packed_tensors(codes, zeros, scales, bits, asymmetric))
    layout = detect_format(config(integers(bits, group, symmetric=not asymmetric), format="pack-quantized"))
    weight = layout.load(source, "m", torch.float32)
    size = COLUMNS if group is None else group
    expected = (codes - zeros.repeat(size, 1)) * scales.repeat(size, 1)
    assert torch.equal(dequantize(weight).double(), torch.from_numpy(expected))
    assert layout.stored_scheme(source, "m") == (weight.scheme, (ROWS, COLUMNS))
    assert set(source.names) <= {*layout.tensor_names("m")}


def test_act_order_by_group_index() -> None:
    codes, zeros, scales = int_weight(4, 3, True)
    index = torch.randperm(COLUMNS, generator=torch.Generator().manual_seed(1)) // 32
    source = stored(**packed_tensors(codes, zeros, scales, 4, True), weight_g_idx=index.to(torch.int32))
    weight = detect_format(config(integers(4, 32, symmetric=False, actorder="group"))).load(source, "m", torch.float32)
    expected = (codes - zeros[:, index]) * scales[:, index]
    assert torch.equal(dequantize(weight).double(), torch.from_numpy(expected))
    assert isinstance(weight, PackedWeight) and weight.perm is not None


@pytest.mark.parametrize("shape", [(), (1,), (ROWS,), (ROWS, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_scales_of_any_shape_and_dtype(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    codes, _, _ = int_weight(8, 1, False)
    scales = (torch.arange(1, 1 + int(np.prod(shape))) / 64).to(dtype).reshape(shape)
    token = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    source = stored(weight=codes.astype(np.int8), weight_scale=scales)
    weight = detect_format(config(integers(8, None), token)).load(source, "m", torch.float32)
    expected = torch.from_numpy(codes).double() * scales.double().reshape(-1, 1)
    assert torch.equal(dequantize(weight).double(), expected)
    grain = "channel" if len(scales.flatten()) > 1 else "tensor"
    assert str(weight.scheme) == f"int8 {grain} a8 token"


def test_int8_static_asymmetric_activations() -> None:
    codes, _, scales = int_weight(8, 1, False)
    tensor = {"num_bits": 8, "type": "int", "symmetric": False, "strategy": "tensor", "dynamic": False}
    tensors = {"weight": codes.astype(np.int8), "weight_scale": scales, "input_scale": torch.tensor([0.5])}
    layout = detect_format(config(integers(8, None), tensor))
    weight = layout.load(stored(**tensors, input_zero_point=torch.tensor([-7], dtype=torch.int8)), "m", torch.float32)
    assert isinstance(weight, EightBitWeight) and weight.input_scale is not None and weight.input_zero is not None
    assert (weight.input_scale.item(), weight.input_zero.item()) == (0.5, -7.0)
    symmetric = layout.load(stored(**tensors, input_zero_point=torch.zeros(1, dtype=torch.int8)), "m", torch.float32)
    assert symmetric.scheme == Int8((1, -1), Activation(Element.INT8, 0, dynamic=False))
    with pytest.raises(CheckpointError, match=r"m\.input_scale is missing"):
        layout.check(stored(weight=tensors["weight"], weight_scale=scales))


def test_w4afp8_stores_a_code_per_byte() -> None:
    codes, _, scales = int_weight(4, 3, False)
    source = stored(weight=codes.astype(np.int8), weight_scale=torch.from_numpy(scales).to(torch.bfloat16))
    token = floats(8, "token", dynamic=True)
    weight = detect_format(config(integers(4, 32), token, format="int-quantized")).load(source, "m", torch.float32)
    assert isinstance(weight, PackedWeight) and str(weight.scheme) == "w4g32 sym a-fp8 token"
    assert torch.equal(dequantize(weight).double(), torch.from_numpy(codes * scales.repeat(32, 1)))


@pytest.mark.parametrize("block", [[128, 128], [16, 40]])
def test_fp8_blocks_with_ragged_edges(block: list[int]) -> None:
    rows, columns = 24, 200
    codes = torch.randn(rows, columns).to(torch.float8_e4m3fn)
    scales = torch.rand(-(-rows // block[0]), -(-columns // block[1])).to(torch.bfloat16)
    inputs = floats(8, "group", group_size=128, dynamic=True)
    layout = detect_format(config(floats(8, "block", block_structure=block), inputs, format="float-quantized"))
    weight = layout.load(stored(weight=codes, weight_scale=scales), "m", torch.float32)
    values = dequantize(weight)
    for n in range(rows):
        for k in range(columns):
            scale = scales[n // block[0], k // block[1]]
            assert values[n, k].item() == codes[n, k].float().item() * scale.item()


@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4", "mxfp8"])
def test_small_floats(kind: str) -> None:
    random = torch.Generator().manual_seed(2)
    group = 16 if kind == "nvfp4" else 32
    exponents = torch.randint(120, 130, (ROWS, COLUMNS // group), generator=random, dtype=torch.uint8)
    tensors: dict[str, Any] = {"weight_scale": exponents}
    scales, weights = 2.0 ** (exponents.double() - 127), floats(4, "group", group_size=32, scale_dtype="torch.uint8")
    if kind == "nvfp4":
        tensors["weight_scale"] = torch.rand(exponents.shape, generator=random).to(torch.float8_e4m3fn)
        tensors["weight_global_scale"] = torch.tensor([3.0])
        scales, weights = tensors["weight_scale"].float() / 3.0, floats(4, "tensor_group", group_size=16)
    if kind == "mxfp8":
        values = torch.randn(ROWS, COLUMNS, generator=random).to(torch.float8_e4m3fn)
        tensors["weight"], weights = values, {**weights, "num_bits": 8}
    else:
        nibbles = torch.randint(0, 16, (ROWS, COLUMNS), generator=random)
        tensors["weight_packed"] = (nibbles[:, 0::2] + 16 * nibbles[:, 1::2]).to(torch.uint8)
        values = torch.tensor([[E2M1[c % 8] * (-1 if c > 7 else 1) for c in row] for row in nibbles.tolist()])
    source = stored(**tensors)
    weight = detect_format(config(weights)).load(source, "m", torch.float32)
    assert isinstance(weight, MicroScaledWeight)
    expected = values.to(scales.dtype) * scales.repeat_interleave(group, dim=1)
    assert torch.equal(dequantize(weight).to(scales.dtype), expected)


def test_exponents_are_known_by_their_type() -> None:
    """Early MXFP8 configs do not say scale_dtype."""
    codes, exponents = torch.randn(4, 64).to(torch.float8_e4m3fn), torch.full((4, 2), 126, dtype=torch.uint8)
    group = floats(8, "group", group_size=32)
    layout = detect_format(config(group, {**group, "dynamic": True}, format="mxfp8-quantized"))
    weight = layout.load(stored(weight=codes, weight_scale=exponents), "m", torch.float32)
    assert str(weight.scheme) == "mxfp8 g32 a-mxfp8 g32" and torch.equal(dequantize(weight), codes.float() / 2)


def test_nvfp4_needs_its_global_scale() -> None:
    packed, scales = torch.zeros(4, 8, dtype=torch.uint8), torch.ones(4, 1).to(torch.float8_e4m3fn)
    layout = detect_format(config(floats(4, "tensor_group", group_size=16)))
    with pytest.raises(CheckpointError, match=r"m\.weight_global_scale is missing"):
        layout.check(stored(weight_packed=packed, weight_scale=scales))


def test_nvfp4_static_activations_need_their_scale() -> None:
    weights = floats(4, "tensor_group", group_size=16)
    source = stored(
        weight_packed=torch.zeros(4, 8, dtype=torch.uint8),
        weight_scale=torch.ones(4, 1).to(torch.float8_e4m3fn),
        weight_global_scale=torch.tensor([2.0]),
    )
    with pytest.raises(CheckpointError, match=r"m\.input_global_scale is missing"):
        detect_format(config(weights, {**weights, "dynamic": "local"})).check(source)


def test_target_precedence() -> None:
    """B024: exact names, then patterns, then the class, whatever the order of the groups."""
    eight = {"targets": ["re:.*q_proj", "re:.*k_proj", "re:.*v_proj"], "weights": integers(8, None)}
    four = {"targets": ["Linear"], "weights": integers(4, 32)}
    exact = {"targets": ["model.layers.1.self_attn.q_proj"], "weights": integers(2, 16)}
    for groups in ([eight, four, exact], [four, exact, eight], [exact, four, eight]):
        raw = {"quant_method": "compressed-tensors", "config_groups": {f"g{i}": g for i, g in enumerate(groups)}}
        layout = detect_format({**raw, "ignore": ["lm_head", "re:.*down_proj"]})
        prefix = "model.layers.0.self_attn."
        assert [str(layout.scheme(prefix + name)) for name in ("q_proj", "qkv_proj", "o_proj")] == [
            "w8 channel sym",
            "w8 channel sym",
            "w4g32 sym",
        ]
        assert str(layout.scheme("model.layers.1.self_attn.q_proj")) == "w2g16 sym"
        assert str(layout.scheme("model.layers.1.mlp.down_proj")) == str(layout.scheme("lm_head")) == "dense"


def test_mixed_precision_goes_by_each_group() -> None:
    fp8 = {"targets": ["re:.*mlp.*"], "weights": floats(8, "channel"), "input_activations": None}
    four = {"targets": ["re:.*attn.*"], "weights": integers(4, 32), "format": "pack-quantized"}
    raw = {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": {"a": fp8, "b": four}}
    layout = detect_format(raw)
    names = ("layers.0.mlp.up_proj", "layers.0.attn.q_proj", "lm_head")
    assert [str(layout.scheme(name)) for name in names] == ["fp8 channel", "w4g32 sym", "dense"]


def test_experts_under_their_other_names() -> None:
    codes, zeros, scales = int_weight(4, 3, False)
    tensors = packed_tensors(codes, zeros, scales, 4, False)
    experts = "model.layers.0.block_sparse_moe.experts.2"
    source = StoredTensors({f"{experts}.gate_proj.{name}": torch.as_tensor(t) for name, t in tensors.items()})
    weight = detect_format(config(integers(4, 32))).load(source, f"{experts}.w1", torch.float32)
    assert torch.equal(dequantize(weight).double(), torch.from_numpy(codes * scales.repeat(32, 1)))


def test_a_16_bit_weight_is_dense_whatever_lies_beside_it() -> None:
    plain = torch.randn(4, 8, dtype=torch.bfloat16)
    source = stored(weight=plain, weight_scale=torch.full((4, 1), 1e15))
    layout = detect_format(config(floats(8, "channel")))
    assert torch.equal(dequantize(layout.load(source, "m", torch.float32)), plain.float())
    assert str(layout.check(source)[0][1]) == "dense"


def test_kv_cache_only() -> None:
    layout = detect_format({"quant_method": "compressed-tensors", "format": "dense", "config_groups": {}, "ignore": []})
    assert str(layout.scheme("model.layers.0.self_attn.q_proj")) == "dense"


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (config(integers(4, 32), format="marlin-24"), "marlin-24.*pack-quantized"),
        (config(integers(4, 32), sparsity_config={"format": "sparse-24-bitmask"}), "sparse-24-bitmask"),
        (config(integers(4, 32), transform_config={"config_groups": {"R1": {}}}), "transform"),
    ],
)
def test_variants_are_refused_by_name(raw: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        detect_format(raw)


@pytest.mark.parametrize(
    ("weights", "inputs"),
    [
        (integers(1, 32), None),
        (floats(6, "group", group_size=32), None),
        (floats(8, "channel", symmetric=False), None),
        (integers(8, None), {"num_bits": 4, "type": "int", "strategy": "token", "dynamic": True}),
        (integers(8, None), {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": False}),
        (floats(8, "channel"), floats(4, "token", dynamic=True)),
        (floats(8, "channel"), floats(8, "tensor_group", dynamic="local")),
        ({}, floats(8, "tensor", dynamic=True)),
    ],
)
def test_schemes_are_refused_with_the_layer_and_what_is_served(weights: dict[str, Any], inputs: Any) -> None:
    layout = detect_format(config(weights, inputs))
    source = stored(weight=torch.zeros(4, 8, dtype=torch.int8), weight_scale=torch.ones(1))
    with pytest.raises(UnsupportedError, match=r"^m: .*served are"):
        layout.check(source)
    assert source.taken == []


def test_damage_is_named() -> None:
    codes, zeros, scales = int_weight(4, 3, True)
    tensors = packed_tensors(codes, zeros, scales, 4, True)
    layout = detect_format(config(integers(4, 32, symmetric=False)))
    for part, words in (("weight_scale", "m.weight_scale is missing"), ("weight_zero_point", "zero_point is missing")):
        with pytest.raises(CheckpointError, match=words):
            layout.load(stored(**{n: t for n, t in tensors.items() if n != part}), "m", torch.float32)
    with pytest.raises(CheckpointError, match="fits neither"):
        layout.load(stored(**{**tensors, "weight_scale": torch.ones(7, 3)}), "m", torch.float32)
    ignored = detect_format({**config(integers(4, 32)), "ignore": ["m"]})
    with pytest.raises(CheckpointError, match="leaves m out"):
        ignored.load(stored(**tensors), "m", torch.float32)


def test_a_config_that_contradicts_its_tensors_is_named_with_both_values() -> None:
    codes, zeros, scales = int_weight(4, 3, True)
    tensors = packed_tensors(codes, zeros, scales, 4, True)
    right = detect_format(config(integers(4, 32, symmetric=False)))
    columns = right.load(stored(**tensors), "m", torch.float32).shape[1]
    for change, words in (
        (
            {"group_size": 16},
            f"scale for every {columns // 3} input features; the config says group_size 16.*config.json",
        ),
        ({"num_bits": 8}, "in the 8 bits that the config says"),
        ({"symmetric": True}, "zero_point.*not the middle; the config says symmetric: true"),
        ({"actorder": "group"}, "weight_g_idx is missing.*actorder: group"),
    ):
        weights = {**integers(4, 32, symmetric=False), **change}
        with pytest.raises(CheckpointError, match=words):
            detect_format(config(weights)).load(stored(**tensors), "m", torch.float32)
