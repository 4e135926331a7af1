"""Each written format against its definition, decoded code by code; and what each refuses."""

from __future__ import annotations

import awq_oracle
import numpy as np
import pytest
import torch
from gptq_oracle import decode_linear, read_streams
from torch import Tensor
from twofold.errors import ConfigError
from twofold.quant.canonical import CanonicalWeight, PackedWeight, dequantize, pack
from twofold.quant.formats.write_format import WriteFormat
from twofold.quant.formats.writers import WRITERS, default_format, writer_for
from twofold.quant.methods.eight_bit import quantize_eight_bit
from twofold.quant.scheme import Activation, Dense, Element, Fp8, Int8, LowBit, Scheme, WeightOnly
from twofold.quant.spec import FORMATS, QuantizeSpec

ROWS, COLUMNS = 64, 256
TOKEN8, TOKEN_FP8 = Activation(Element.INT8), Activation(Element.FP8)
STATIC8 = Activation(Element.INT8, 0, dynamic=False, symmetric=False)
STATIC_FP8 = Activation(Element.FP8, 0, dynamic=False)
BLOCKS = Fp8((32, 64), Activation(Element.FP8, 64))


def integers(scheme: WeightOnly) -> PackedWeight:
    """Random codes, zeros of every value (0 too), scales of both signs."""
    random = torch.Generator().manual_seed(3)
    top = 2**scheme.bits
    codes = torch.randint(0, top, (ROWS, COLUMNS), generator=random)
    groups = scheme.num_groups(COLUMNS)
    zeros = None if scheme.symmetric else torch.randint(0, top, (ROWS, groups), generator=random).to(torch.uint8)
    scales = torch.randn(ROWS, groups, generator=random).half()
    perm = torch.randperm(COLUMNS, generator=random).int() if scheme.act_order else None
    return PackedWeight(scheme, (ROWS, COLUMNS), pack(codes, scheme.bits), scales, zeros, perm)


def weight_of(scheme: Scheme) -> CanonicalWeight:
    if isinstance(scheme, WeightOnly):
        return integers(scheme)
    assert isinstance(scheme, Int8 | Fp8)
    static = scheme.activation is not None and not scheme.activation.dynamic
    values = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(4))
    weight = quantize_eight_bit(values, scheme, torch.tensor(0.125) if static else None)
    if static and isinstance(scheme, Int8):
        object.__setattr__(weight, "input_zero", torch.tensor(-7.0))
    return weight


def decode_awq(tensors: dict[str, Tensor], group_size: int) -> np.ndarray:
    def nibbles(words: Tensor) -> np.ndarray:
        values = words.numpy().view(np.uint32)
        result = np.zeros((values.shape[0], values.shape[1] * 8), dtype=np.int64)
        for nibble, column in enumerate(awq_oracle.ORDER):
            result[:, column::8] = (values >> np.uint32(4 * nibble)) & 15
        return result

    groups = np.arange(COLUMNS) // (COLUMNS if group_size == -1 else group_size)
    codes, zeros, scales = nibbles(tensors["qweight"]), nibbles(tensors["qzeros"]), tensors["scales"].double().numpy()
    return ((codes - zeros[groups]) * scales[groups]).T


def decode_packed(tensors: dict[str, Tensor], bits: int) -> np.ndarray:
    rows, columns = tensors["weight_shape"].tolist()
    scales = tensors["weight_scale"].double().numpy()
    groups = np.arange(columns) * scales.shape[1] // columns
    codes = read_streams(tensors["weight_packed"], bits, columns).astype(np.int64)
    zeros = np.full(scales.shape, 2 ** (bits - 1))
    if "weight_zero_point" in tensors:
        zeros = read_streams(tensors["weight_zero_point"].T, bits, rows).T.astype(np.int64)
    return (codes - zeros[:, groups]) * scales[:, groups]


def decode_eight_bits(tensors: dict[str, Tensor]) -> np.ndarray:
    """code * scale; the scales' shape says what each is for."""
    codes = tensors["weight"].float().double().numpy()
    scales = tensors.get("weight_scale", tensors.get("weight_scale_inv")).double().numpy()
    zeros = tensors["weight_zero_point"].double().numpy() if "weight_zero_point" in tensors else np.zeros_like(scales)
    if scales.ndim == 2:
        scales, zeros = (v.repeat(ROWS // v.shape[0], 0).repeat(COLUMNS // v.shape[1], 1) for v in (scales, zeros))
    return (codes - zeros) * scales


CASES: list[tuple[str, Scheme]] = [
    *[("gptq", WeightOnly(bits, 32, act_order=True)) for bits in (2, 3, 4, 8)],
    *[("gptq", WeightOnly(bits, -1)) for bits in (2, 3, 4, 8)],
    *[("gptq_v2", WeightOnly(bits, 64, symmetric)) for bits in (2, 3, 4, 8) for symmetric in (True, False)],
    *[("awq", WeightOnly(4, size, symmetric)) for size in (32, -1) for symmetric in (True, False)],
    *[("compressed-tensors", WeightOnly(bits, size, symmetric)) for bits, size, symmetric in (
        (4, 32, True), (4, 128, False), (8, -1, True), (8, -1, False), (3, 64, False), (2, 32, True))],
    *[("compressed-tensors", scheme) for scheme in (
        Int8((1, -1), TOKEN8), Int8((1, -1), TOKEN8, symmetric=False), Int8((1, -1), STATIC8), Int8((1, 64), TOKEN8),
        Fp8((1, -1), TOKEN_FP8), Fp8((-1, -1), STATIC_FP8), Fp8((1, -1), STATIC_FP8), Fp8((1, 64), TOKEN_FP8),
        Fp8((1, -1)), BLOCKS)],
    *[("fp8", scheme) for scheme in (BLOCKS, Fp8((-1, -1), TOKEN_FP8), Fp8((-1, -1), STATIC_FP8))],
]  # fmt: skip


@pytest.mark.parametrize(("name", "scheme"), CASES, ids=lambda value: str(value).replace(" ", "-"))
def test_stored_tensors_mean_the_weight(name: str, scheme: Scheme) -> None:
    writer: WriteFormat = WRITERS[name]()
    assert writer.cannot_store((ROWS, COLUMNS), scheme) is None
    weight = weight_of(scheme)
    tensors = writer.to_tensors(weight, scheme)
    layout = writer.tensor_layout((ROWS, COLUMNS), scheme)
    assert {part: (tensor.dtype, tuple(tensor.shape)) for part, tensor in tensors.items()} == layout
    assert all(tensor.is_contiguous() for tensor in tensors.values())
    if isinstance(scheme, WeightOnly):
        decoders = {
            "awq": lambda: decode_awq(tensors, scheme.group_size),
            "compressed-tensors": lambda: decode_packed(tensors, scheme.bits),
        }
        decoded = decoders.get(name, lambda: decode_linear(tensors, scheme.bits, 1 if name == "gptq" else 2))()
    else:
        decoded = decode_eight_bits(tensors)
    assert np.allclose(decoded, dequantize(weight).double().numpy(), rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize(("name", "scheme"), CASES, ids=lambda value: str(value).replace(" ", "-"))
def test_the_config_says_the_scheme(name: str, scheme: Scheme) -> None:
    """By the reader, which other tests hold against checkpoints of the real tools."""
    from twofold.quant.formats import detect_format

    modules = [f"model.layers.0.{part}" for part in ("self_attn.q_proj", "mlp.up_proj")]
    config = WRITERS[name]().config(dict.fromkeys(modules, scheme), ["model.layers.0.mlp.down_proj"], "rtn")
    reader = detect_format(config)
    assert isinstance(reader.scheme("model.layers.0.mlp.down_proj"), Dense)
    assert isinstance(reader.scheme("lm_head"), Dense)
    said = reader.scheme(modules[0])
    if isinstance(scheme, WeightOnly):
        # AWQ has one word for both; GPTQ's act-order lies in the tensors.
        assert isinstance(said, WeightOnly) and (said.bits, said.group_size) == (scheme.bits, scheme.group_size)
        assert name == "awq" or said.symmetric == scheme.symmetric
    else:
        assert said == scheme


def test_static_inputs_are_stored() -> None:
    writer = WRITERS["compressed-tensors"]()
    scheme = Int8((1, -1), STATIC8)
    tensors = writer.to_tensors(weight_of(scheme), scheme)
    assert float(tensors["input_scale"]) == 0.125 and int(tensors["input_zero_point"]) == -7
    tensors = WRITERS["fp8"]().to_tensors(weight_of(Fp8((-1, -1), STATIC_FP8)), Fp8((-1, -1), STATIC_FP8))
    assert tensors["input_scale"].shape == () and float(tensors["input_scale"]) == 0.125


@pytest.mark.parametrize("name", ["awq", "compressed-tensors", "gptq_v2"])
def test_zeros_that_are_all_the_middle_are_spelled_out(name: str) -> None:
    """A method may find that no zero is needed; the config has said asymmetric."""
    scheme = WeightOnly(4, 32, symmetric=False)
    weight = integers(WeightOnly(4, 32))
    tensors = WRITERS[name]().to_tensors(weight, scheme)
    assert tensors.keys() == WRITERS[name]().tensor_layout((ROWS, COLUMNS), scheme).keys()
    part = "weight_zero_point" if name == "compressed-tensors" else "qzeros"
    assert bool((tensors[part] == 0x88888888 - (1 << 32)).all())


def test_schemes_of_a_mixture_are_told_apart() -> None:
    schemes = {
        "model.layers.0.mlp.up_proj": WeightOnly(4, 32, symmetric=False),
        "model.layers.1.mlp.up_proj": WeightOnly(8, 128, symmetric=False),
        "model.layers.11.mlp.up_proj": WeightOnly(4, 32, symmetric=False),
    }
    from twofold.quant.formats import detect_format

    for name in ("compressed-tensors", "gptq_v2"):
        reader = detect_format(WRITERS[name]().config(schemes, [], "auto"))
        assert {module: reader.scheme(module) for module in schemes} == schemes


class TestRefusals:
    """An impossible combination is refused with the formats that would do."""

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"format": "gptq"}, r"zero point of 0.*formats that can: gptq_v2, awq, compressed-tensors"),
            ({"format": "awq", "bits": 3}, r"4 bits, not w3.*formats that can: gptq_v2, compressed-tensors"),
            ({"format": "fp8"}, "e4m3 weights, not w4"),
            (
                {"format": "awq", "method": "gptq", "order": "full"},
                "no act-order; formats that can: gptq_v2; or another --order",
            ),
            ({"format": "compressed-tensors", "method": "gptq", "order": "full"}, "no act-order any more"),
            ({"format": "gptq_v2", "method": "fp8"}, "integer weights, not fp8.*formats that can: compressed-tensors$"),
            ({"format": "fp8", "method": "fp8"}, "one scale per matrix, or square blocks"),
            ({"format": "awq", "method": "smoothquant"}, "not int8.*formats that can: compressed-tensors$"),
            ({"format": "awq", "method": "auto", "target_bits": 4.5}, "same bits and group size; formats that can"),
            ({"format": "gptq_v2", "kv_cache": "fp8"}, "no place for scales of an fp8 KV cache"),
            ({"format": "fp8", "method": "fp8", "variant": "block", "kv_cache": "int8"}, "scales of an int8 KV cache"),
        ],
        ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else "",
    )  # fmt: skip
    def test_combinations(self, options: dict[str, object], words: str) -> None:
        with pytest.raises(ConfigError, match=words):
            writer_for(QuantizeSpec(**options))  # type: ignore[arg-type]

    def test_a_format_that_is_none(self) -> None:
        with pytest.raises(ConfigError, match="format 'gguf' is not one of gptq, gptq_v2, awq"):
            QuantizeSpec(format="gguf")

    def test_matrices_that_do_not_fit(self) -> None:
        awq, ct, fp8 = (WRITERS[name]() for name in ("awq", "compressed-tensors", "fp8"))
        assert "not divisible by the group size 64" in str(awq.cannot_store((64, 96), WeightOnly(4, 64)))
        assert "20 output features" in str(awq.cannot_store((20, 64), WeightOnly(4, 64)))
        assert ct.cannot_store((20, 72), WeightOnly(4, -1, symmetric=False)) is None
        assert "64 x 96 features are not divisible by blocks of 32 x 64" in str(fp8.cannot_store((64, 96), BLOCKS))
        assert "not w4" in str(ct.cannot_store((64, 64), LowBit(4, 32, activation=TOKEN8)))

    def test_awq_names_modules_by_parts(self) -> None:
        with pytest.raises(ConfigError, match=r"mlp\.gate stays plain.*mlp\.gate_proj has that part"):
            WRITERS["awq"]().config(
                {"model.layers.0.mlp.gate_proj": WeightOnly(4, 32)}, ["model.layers.0.mlp.gate"], "awq"
            )


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"symmetric": True}, "gptq"),
        ({}, "gptq_v2"),
        ({"method": "awq"}, "awq"),
        ({"method": "awq", "bits": 3}, "gptq_v2"),
        ({"method": "auto", "target_bits": 4.0}, "gptq_v2"),
        ({"method": "smoothquant"}, "compressed-tensors"),
        ({"method": "fp8"}, "compressed-tensors"),
        ({"method": "fp8", "variant": "static"}, "compressed-tensors"),
        ({"method": "fp8", "variant": "block"}, "fp8"),
        ({"kv_cache": "fp8"}, "compressed-tensors"),
    ],
    ids=str,
)
def test_defaults(options: dict[str, object], name: str) -> None:
    spec = QuantizeSpec(**options)  # type: ignore[arg-type]
    assert default_format(spec) == name and writer_for(spec).name == name


def test_every_format_has_a_word() -> None:
    assert tuple(WRITERS) == FORMATS
