"""The 8-bit matmul against the product of dequantized codes in float64."""

from __future__ import annotations

import random

import pytest
import torch
from eight_bit_cases import EIGHT_BIT_SCHEMES, eight_bit_weight
from tolerance import assert_near
from torch import Tensor
from twofold.kernels import reference
from twofold.kernels.quantized_input import QuantizedInput
from twofold.kernels.triton.launch_table import LinearLaunch
from twofold.kernels.triton.scaled_linear import launch_scaled, scaled_linear
from twofold.kernels.triton.scaled_weight import ScaledWeight, prepare_fnuz, prepare_native, prepare_wide
from twofold.quant.canonical import EightBitWeight, MicroScaledWeight, dequantize
from twofold.quant.scheme import Activation, Element, Fp8, Int8, MicroScaled

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SMALL = LinearLaunch(16, 32, 64, 4, 1)
QUANTIZING = [scheme for scheme in EIGHT_BIT_SCHEMES if scheme.activation is not None]
FLOATS = [scheme for scheme in EIGHT_BIT_SCHEMES if isinstance(scheme, Fp8)]


def make_rows(rows: int, features: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    x = torch.randn(rows, features, generator=torch.Generator().manual_seed(seed + 1))
    return (x * torch.logspace(-1, 1, rows)[:, None]).to(dtype)


def check(
    x: Tensor,
    weight: EightBitWeight,
    prepared: ScaledWeight,
    bias: Tensor | None = None,
    launch: LinearLaunch = SMALL,
    splits: int = 1,
) -> None:
    """The input's codes are the definition's, so that no tie rounds differently."""
    given: Tensor | QuantizedInput = x
    values = x.double()
    if prepared.input is not None:
        wanted = prepared.input
        given = reference.quantize_activation(x, wanted.how, wanted.scale, wanted.zero, codes_dtype=wanted.codes_dtype)
        values = given.dequantize(torch.float64)
    dense = dequantize(weight, torch.float64)
    expected = values @ dense.T
    scale = (values.square() @ dense.square().T).sqrt()
    if bias is not None:
        expected, scale = expected + bias.double(), scale + bias.double().abs()
    actual = launch_scaled(given, prepared, bias, launch, splits)
    assert actual.dtype is x.dtype
    assert_near((actual.double() / (scale + 1e-9)).to(actual.dtype), expected / (scale + 1e-9), factor=4.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scheme", QUANTIZING, ids=str)
def test_products_of_codes(scheme: Int8 | Fp8, dtype: torch.dtype) -> None:
    weight = eight_bit_weight(scheme, 40, 208)
    check(make_rows(3, 208, dtype), weight, prepare_native(weight, dtype), torch.randn(40).to(dtype))


@pytest.mark.parametrize("scheme", QUANTIZING, ids=str)
def test_fnuz_chips(scheme: Int8 | Fp8) -> None:
    weight = eight_bit_weight(scheme, 40, 160)
    prepared = prepare_fnuz(weight, torch.bfloat16)
    assert (prepared.codes.dtype is torch.int8) == isinstance(scheme, Int8)
    assert isinstance(scheme, Int8) or prepared.codes.dtype is torch.float8_e4m3fnuz
    check(make_rows(3, 160, torch.bfloat16), weight, prepared)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scheme", FLOATS, ids=str)
def test_weights_decoded_to_floats(scheme: Fp8, dtype: torch.dtype) -> None:
    weight = eight_bit_weight(scheme, 40, 208)
    check(make_rows(3, 208, dtype), weight, prepare_wide(weight, dtype))


def test_mxfp8() -> None:
    """Exponents as scales, as float32 scales of groups of 32."""
    how = Activation(Element.FP8, 32, power_of_two=True)
    codes = eight_bit_weight(Fp8((1, 32), how), 40, 96).codes
    exponents = torch.randint(110, 126, (40, 3), dtype=torch.uint8)
    scales = torch.ldexp(torch.ones(40, 3), exponents.int() - 127)
    same = EightBitWeight(Fp8((1, 32), how), codes, scales)
    weight = MicroScaledWeight(MicroScaled(Element.FP8, 32, True, how), (40, 96), codes, exponents)
    x = make_rows(3, 96, torch.float32)
    for prepare in (prepare_native, prepare_fnuz, prepare_wide):
        check(x, same, prepare(weight, x.dtype))


def test_every_code_is_decoded() -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(1, 1).view(torch.float8_e4m3fn)
    codes = torch.where(codes.float().isnan(), torch.zeros(1), codes.float()).to(torch.float8_e4m3fn)
    weight = EightBitWeight(Fp8((1, -1)), codes.T.contiguous(), torch.ones(256, 1))
    for dtype in DTYPES:
        x = torch.ones(1, 1, dtype=dtype)
        actual = launch_scaled(x, prepare_wide(weight, dtype), None, SMALL, 1)
        assert torch.equal(actual, codes.float().to(dtype))


@pytest.mark.parametrize(("rows", "outputs", "features"), [(1, 1, 1), (1, 1000, 144), (33, 17, 100), (0, 8, 64)])
@pytest.mark.parametrize(
    "scheme", [QUANTIZING[2], QUANTIZING[5], QUANTIZING[10], QUANTIZING[11], QUANTIZING[12]], ids=str
)
def test_ragged_shapes(scheme: Int8 | Fp8, rows: int, outputs: int, features: int) -> None:
    weight = eight_bit_weight(scheme, outputs, features)
    x, bias = make_rows(rows, features, torch.float16), torch.randn(outputs).half()
    if rows == 0:
        assert scaled_linear(x, prepare_native(weight, x.dtype), bias).shape == (0, outputs)
        return
    check(x, weight, prepare_native(weight, x.dtype), bias)


@pytest.mark.parametrize("splits", [2, 3])
@pytest.mark.parametrize("scheme", EIGHT_BIT_SCHEMES, ids=str)
def test_split_features(scheme: Int8 | Fp8, splits: int) -> None:
    weight, x, bias = eight_bit_weight(scheme, 40, 448), make_rows(5, 448, torch.float16), torch.randn(40).half()
    prepared = prepare_wide(weight, x.dtype) if scheme.activation is None else prepare_native(weight, x.dtype)
    check(x, weight, prepared, bias, splits=splits)


def test_integer_sums_are_exact() -> None:
    """Sums beyond 2^24, where float32 has no odd numbers, that cancel to a small one."""
    features = 4096
    codes = torch.full((1, features), 127, dtype=torch.int8)
    codes[0, features // 2 :] = -127
    how = Activation(Element.INT8, 0, dynamic=False)
    weight = EightBitWeight(Int8((1, -1), how), codes, torch.ones(1, 1), input_scale=torch.tensor(1.0))
    x = torch.full((1, features), 127.0)
    x[0, -1] = 126.0
    assert scaled_linear(x, prepare_native(weight, x.dtype)).item() == 127.0


def test_any_leading_dimensions_strides_and_inputs() -> None:
    scheme = Int8((1, -1), Activation(Element.INT8))
    weight, x = eight_bit_weight(scheme, 16, 64), make_rows(6, 128, torch.float32)[:, ::2]
    prepared = prepare_native(weight, x.dtype)
    flat = scaled_linear(x, prepared)
    assert torch.equal(scaled_linear(x.reshape(2, 3, 64), prepared).view(6, 16), flat)
    quantized = reference.quantize_activation(x, scheme.activation)
    torch.testing.assert_close(flat, reference.scaled_matmul(quantized, weight), rtol=1e-3, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_random_problems(seed: int) -> None:
    draw = random.Random(seed)
    scheme = draw.choice(EIGHT_BIT_SCHEMES)
    features = draw.choice([16, 96, 144, 160, 256, 320, 400])
    weight = eight_bit_weight(scheme, draw.choice([1, 15, 64, 100, 300]), features, seed)
    dtype = draw.choice(DTYPES)
    wide = isinstance(scheme, Fp8) and (scheme.activation is None or draw.random() < 0.3)
    prepare = prepare_wide if wide else draw.choice([prepare_native, prepare_fnuz])
    launch = LinearLaunch(draw.choice([16, 32, 64]), draw.choice([16, 32, 64]), draw.choice([32, 64, 128]), 4, 1)
    x = make_rows(draw.choice([1, 2, 16, 17, 50]), features, dtype, seed)
    check(x, weight, prepare(weight, dtype), None, launch, draw.choice([1, 2, 4]))
