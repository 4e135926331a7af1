"""Quantized inputs and the product of codes, against fake_quantize and float64 products."""

from __future__ import annotations

import pytest
import torch
from eight_bit_cases import EIGHT_BIT_SCHEMES, eight_bit_weight, static_input
from twofold.kernels.reference import fake_quantize, quantize_activation, scaled_matmul
from twofold.quant.canonical import EightBitWeight, dequantize
from twofold.quant.scheme import Activation, Element, Int8

ACTIVATIONS = [
    Activation(Element.INT8),
    Activation(Element.INT8, symmetric=False),
    Activation(Element.INT8, 0),
    Activation(Element.INT8, 0, symmetric=False),
    Activation(Element.INT8, 0, dynamic=False),
    Activation(Element.INT8, 0, dynamic=False, symmetric=False),
    Activation(Element.INT8, 32),
    Activation(Element.FP8),
    Activation(Element.FP8, 128),
    Activation(Element.FP8, 48),
    Activation(Element.FP8, 0, dynamic=False),
    Activation(Element.FP8, 32, power_of_two=True),
]


def rows(count: int, columns: int) -> torch.Tensor:
    x = torch.randn(count, columns, generator=torch.Generator().manual_seed(count))
    return x * torch.logspace(-3, 3, count)[:, None]


@pytest.mark.parametrize("how", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("shape", [(1, 144), (5, 100), (3, 256)])
def test_codes_and_scales_stand_for_what_fake_quantize_gives(how: Activation, shape: tuple[int, int]) -> None:
    x, (scale, zero) = rows(*shape), static_input(how)
    expected = fake_quantize(x, how, scale, zero)
    actual = quantize_activation(x, how, scale, zero)
    assert actual.codes.dtype is (torch.int8 if how.element is Element.INT8 else torch.float8_e4m3fn)
    torch.testing.assert_close(actual.dequantize(), expected, atol=0, rtol=1e-6)


@pytest.mark.parametrize("how", [how for how in ACTIVATIONS if how.element is Element.FP8], ids=str)
def test_fnuz_and_wide_codes_stand_for_the_same_values(how: Activation) -> None:
    x, (scale, _) = rows(4, 160), static_input(how)
    usual = quantize_activation(x, how, scale)
    doubled = None if scale is None else scale * 2
    fnuz = quantize_activation(x, how, doubled, codes_dtype=torch.float8_e4m3fnuz)
    wide = quantize_activation(x, how, scale, codes_dtype=torch.bfloat16)
    assert torch.equal(fnuz.dequantize(), usual.dequantize())
    assert torch.equal(wide.codes.float(), usual.codes.float()) and torch.equal(wide.scale, usual.scale)


def test_no_tokens() -> None:
    for how in ACTIVATIONS:
        assert quantize_activation(torch.empty(0, 64), how, *static_input(how)).codes.shape == (0, 64)


@pytest.mark.parametrize("scheme", [scheme for scheme in EIGHT_BIT_SCHEMES if scheme.activation], ids=str)
def test_the_product_is_that_of_the_values(scheme: object) -> None:
    weight, x, bias = eight_bit_weight(scheme, 40, 208), rows(3, 208), torch.randn(40)
    how = scheme.activation  # type: ignore[attr-defined]
    quantized = quantize_activation(x, how, weight.input_scale, weight.input_zero)
    expected = quantized.dequantize(torch.float64) @ dequantize(weight, torch.float64).T
    size = quantized.dequantize(torch.float64).abs() @ dequantize(weight, torch.float64).abs().T
    actual = scaled_matmul(quantized, weight, bias)
    assert actual.dtype is x.dtype
    assert ((actual.double() - expected - bias).abs() <= 1e-6 * (size + bias.abs())).all()


def test_integer_sums_are_exact() -> None:
    x = torch.full((1, 70001), 127.0)
    how = Activation(Element.INT8, 0, dynamic=False)
    codes = torch.full((1, 70001), 127, dtype=torch.int8)
    weight = EightBitWeight(Int8((-1, -1), how), codes, torch.ones(1, 1), input_scale=torch.tensor(1.0))
    exact = scaled_matmul(quantize_activation(x.double(), how, torch.tensor(1.0)), weight)
    assert exact.item() == 127 * 127 * 70001
