"""AWQ: three packings against their definition; zeros as stored (B033), biases (B031), what the config leaves out."""

from __future__ import annotations

import awq_oracle
import numpy as np
import pytest
import torch
from stored_tensors import StoredTensors
from twofold.errors import CheckpointError, ConfigError, UnsupportedError
from twofold.quant.canonical import PackedWeight, dequantize
from twofold.quant.formats import awq_packing, detect_format
from twofold.quant.scheme import WeightOnly

CONFIG = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}


def random_linear(rows: int, columns: int, group_size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng(7)
    groups = columns // group_size
    codes = random.integers(0, 16, (rows, columns))
    zeros = random.integers(0, 16, (rows, groups))
    zeros.flat[:16] = range(16)
    scales = random.uniform(0.01, 0.1, (rows, groups)).astype(np.float16)
    return codes, zeros, scales


@pytest.mark.parametrize("version", ["gemm", "gemv", "gemv_fast"])
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_dequantizes_as_defined(version: str, group_size: int) -> None:
    codes, zeros, scales = random_linear(32, 256, group_size)
    stored = awq_oracle.encode(version, codes, zeros, scales, group_size)
    source = StoredTensors({f"m.{name}": tensor for name, tensor in stored.items()})
    layout = detect_format({**CONFIG, "version": version.upper(), "group_size": group_size})
    weight = layout.load(source, "m", torch.float32)
    spread = (part.astype(np.float64).repeat(group_size, axis=1) for part in (zeros, scales))
    zero, scale = spread
    offset = -(zero * scale).astype(np.float16).astype(np.float64) if version == "gemv_fast" else -zero * scale
    expected = torch.from_numpy(codes * scale + offset).float()
    torch.testing.assert_close(dequantize(weight), expected, rtol=0, atol=1e-6)
    assert layout.stored_scheme(source, "m") == (weight.scheme, (32, 256))


def test_a_zero_of_0_stays_0_and_nibbles_are_interleaved() -> None:
    codes, zeros, scales = random_linear(32, 64, 32)
    stored = awq_oracle.encode("gemm", codes, zeros, scales, 32)
    source = StoredTensors({f"m.{name}": tensor for name, tensor in stored.items()})
    weight = detect_format(CONFIG).load(source, "m", torch.float32)
    assert isinstance(weight, PackedWeight) and weight.zeros is not None
    assert torch.equal(weight.zeros.long(), torch.from_numpy(zeros))
    in_order = awq_oracle.plain_words(codes.T, 4)
    swapped = StoredTensors({**source.tensors, "m.qweight": in_order})
    assert not torch.equal(dequantize(detect_format(CONFIG).load(swapped, "m", torch.float32)), dequantize(weight))


def test_the_shapes_decide_between_packings() -> None:
    codes, zeros, scales = random_linear(32, 128, 32)
    stored = awq_oracle.encode("gemv", codes, zeros, scales, 32)
    source = StoredTensors({f"m.{name}": tensor for name, tensor in stored.items()})
    right = detect_format({**CONFIG, "version": "gemv"}).load(source, "m", torch.float32)
    assert torch.equal(dequantize(detect_format(CONFIG).load(source, "m", torch.float32)), dequantize(right))


def test_modules_to_not_convert_match_by_substring() -> None:
    layout = detect_format({**CONFIG, "modules_to_not_convert": ["self_attn", "gate"]})
    schemes = {name: str(layout.scheme(f"model.layers.0.{name}")) for name in ("self_attn.q_proj", "mlp.up_proj")}
    assert schemes == {"self_attn.q_proj": "dense", "mlp.up_proj": "w4g32 asym"}
    assert str(layout.scheme("lm_head")) == "dense"
    plain = torch.randn(8, 16, dtype=torch.float16)
    loaded = layout.load(
        StoredTensors({"model.layers.0.self_attn.q_proj.weight": plain}),
        "model.layers.0.self_attn.q_proj",
        torch.float32,
    )
    assert torch.equal(dequantize(loaded), plain.float())


def test_biases_absent_zero_and_real() -> None:
    layout = detect_format(CONFIG)
    bias = torch.randn(8, dtype=torch.float16)
    assert layout.load_bias(StoredTensors({}), "m", torch.float32) is None
    assert layout.load_bias(StoredTensors({"m.bias": torch.zeros(8)}), "m", torch.float32) is None
    loaded = layout.load_bias(StoredTensors({"m.bias": bias}), "m", torch.float32)
    assert loaded is not None and torch.equal(loaded, bias.float())


def test_old_configs_and_other_writers() -> None:
    old = detect_format({"w_bit": 4, "q_group_size": 64, "zero_point": True, "version": "GEMM"})
    assert old.name == "awq" and old.scheme("m") == WeightOnly(4, 64, symmetric=False)
    other = {**CONFIG, "checkpoint_format": "gemm", "format": "gemm", "desc_act": False, "meta": {}}
    assert detect_format(other).scheme("m") == WeightOnly(4, 32, symmetric=False)


def test_wrong_configs_and_tensors_are_named() -> None:
    with pytest.raises(ConfigError, match="bits"):
        detect_format({**CONFIG, "bits": 3})
    with pytest.raises(UnsupportedError, match=r"marlin.*gemm, gemv, gemv_fast"):
        detect_format({**CONFIG, "version": "marlin"})
    codes, zeros, scales = random_linear(32, 128, 32)
    stored = {f"m.{n}": t for n, t in awq_oracle.encode("gemm", codes, zeros, scales, 32).items()}
    with pytest.raises(CheckpointError, match=r"m\.scales is missing"):
        detect_format(CONFIG).load(StoredTensors({"m.qweight": stored["m.qweight"]}), "m", torch.float32)
    with pytest.raises(CheckpointError, match="do not fit AWQ gemm with groups of 64"):
        detect_format({**CONFIG, "group_size": 64}).load(StoredTensors(stored), "m", torch.float32)
    with pytest.raises(CheckpointError, match="stored twice"):
        twice = {**stored, "m.weight": torch.zeros(32, 128)}
        detect_format(CONFIG).load(StoredTensors(twice), "m", torch.float32)


@pytest.mark.parametrize(("rows", "columns"), [(8, 64), (32, 8), (264, 40), (40, 4096)])
def test_words_are_rearranged_without_taking_them_apart(rows: int, columns: int) -> None:
    codes = torch.randint(0, 16, (columns, rows), generator=torch.Generator().manual_seed(rows))
    stored = awq_oracle.encode(
        "gemm", codes.T.numpy(), np.zeros((rows, 1), int), np.ones((rows, 1), np.float16), columns
    )
    stream = awq_packing.stream_of_interleaved(stored["qweight"])
    words = stream.numpy().view(np.uint32).astype(np.uint64)
    for place in range(8):
        assert ((words >> np.uint64(4 * place)) & np.uint64(15) == codes.numpy()[place::8]).all()


def test_a_config_that_contradicts_its_tensors_is_named_with_both_values() -> None:
    codes, zeros, scales = random_linear(32, 128, 32)
    stored = {f"m.{n}": t for n, t in awq_oracle.encode("gemm", codes, zeros, scales, 32).items()}
    bare = {name: tensor for name, tensor in stored.items() if name != "m.qzeros"}
    for tensors, change, words in (
        (stored, {"group_size": 64}, "groups of 64, the config's group_size"),
        (stored, {"group_size": -1}, "groups of 128, the config's group_size"),
        (stored, {"zero_point": False}, r"m\.qzeros .*other than 8; the config says zero_point: false"),
        (bare, {}, r"m\.qzeros is missing .*zero_point: true"),
    ):
        with pytest.raises(CheckpointError, match=words):
            detect_format({**CONFIG, **change}).load(StoredTensors(tensors), "m", torch.float32)
    assert detect_format({**CONFIG, "zero_point": False}).load(StoredTensors(bare), "m", torch.float32).shape == (
        32,
        128,
    )
