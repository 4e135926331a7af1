"""Quantized activations against their definitions, value by value in float64 or plain Python."""

from __future__ import annotations

import math

import pytest
import torch
from twofold.kernels.reference.activation_quantization import fake_quantize
from twofold.quant.fp4 import E2M1, decode_e8m0, decode_fp4, round_fp4
from twofold.quant.scheme import Activation, Element

FP8_VALUES = sorted(
    {v for v in torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double().tolist() if v == v}
)
FP4_VALUES = sorted({sign * value for value in E2M1 for sign in (1.0, -1.0)})


def nearest(value: float, grid: list[float]) -> list[float]:
    """The grid's values at the least distance: two on a tie."""
    least = min(abs(value - point) for point in grid)
    return [point for point in grid if abs(value - point) == least]


def tokens(seed: int = 0, columns: int = 48) -> torch.Tensor:
    x = torch.randn(5, columns, generator=torch.Generator().manual_seed(seed)) * torch.tensor(
        [[1], [9], [0.01], [300], [0]]
    )
    return x


def assert_on_grid(x: torch.Tensor, actual: torch.Tensor, scales: torch.Tensor, grid: list[float]) -> None:
    for value, rounded, scale in zip(
        x.flatten().tolist(), actual.flatten().tolist(), scales.flatten().tolist(), strict=True
    ):
        candidates = nearest(value / scale, grid)
        assert min(abs(rounded - c * scale) for c in candidates) <= 1e-5 * scale * max(1.0, abs(candidates[0])), value


def spread(scales: torch.Tensor, size: int, columns: int) -> torch.Tensor:
    return scales.repeat_interleave(size, dim=1)[:, :columns]


def test_fp8_per_token_and_per_group() -> None:
    x = tokens()
    per_token = (x.abs().amax(1, keepdim=True) / 448).clamp(min=1e-30).expand_as(x)
    assert_on_grid(x, fake_quantize(x, Activation(Element.FP8)), per_token, FP8_VALUES)
    groups = torch.stack([x[:, :32].abs().amax(1), x[:, 32:].abs().amax(1)], 1).clamp(min=1e-30) / 448
    assert_on_grid(x, fake_quantize(x, Activation(Element.FP8, 32)), spread(groups, 32, 48), FP8_VALUES)


def test_fp8_static_saturates() -> None:
    x = torch.tensor([[0.1, -3.0, 700.0, -1e9, 0.0]])
    actual = fake_quantize(x, Activation(Element.FP8, 0, dynamic=False), torch.tensor(0.5))
    assert_on_grid(x, actual, torch.full_like(x, 0.5), FP8_VALUES)
    assert actual[0, 2].item() == 224 and actual[0, 3].item() == -224


@pytest.mark.parametrize("zero", [None, -37.0])
def test_int8_static(zero: float | None) -> None:
    x, scale = tokens(), 0.05
    offset = zero or 0.0
    how = Activation(Element.INT8, 0, dynamic=False, symmetric=zero is None)
    actual = fake_quantize(x, how, torch.tensor(scale), None if zero is None else torch.tensor(zero))
    grid = [float(code) - offset for code in range(-128, 128)]
    assert_on_grid(x, actual, torch.full_like(x, scale), grid)


def test_int8_dynamic_spans_255_steps_of_the_largest_magnitude() -> None:
    x = tokens()
    actual = fake_quantize(x, Activation(Element.INT8))
    scale = (x.abs().amax(1, keepdim=True) / 127.5).clamp(min=1e-30).expand_as(x)
    assert_on_grid(x, actual, scale, [float(code) for code in range(-128, 128)])


def test_int8_dynamic_with_a_zero_point_covers_the_range() -> None:
    x = tokens().abs() + 2
    actual = fake_quantize(x, Activation(Element.INT8, symmetric=False))
    step = x.amax(1, keepdim=True) / 255
    assert ((actual - x).abs() <= step * 1.01).all()
    assert ((fake_quantize(x, Activation(Element.INT8)) - x).abs() > step * 0.6).any()


@pytest.mark.parametrize(("element", "grid", "emax"), [(Element.FP8, FP8_VALUES, 8), (Element.FP4, FP4_VALUES, 2)])
def test_power_of_two_scales(element: Element, grid: list[float], emax: int) -> None:
    x = tokens(3)[:4]
    actual = fake_quantize(x, Activation(element, 16, power_of_two=True))
    scales = torch.empty(4, 3)
    for row in range(4):
        for group in range(3):
            amax = x[row, 16 * group : 16 * group + 16].abs().max().item()
            exponent = math.floor(math.log2(amax))
            scales[row, group] = 2.0 ** (exponent + (amax / 2**exponent >= 1.75) - emax)
    clamped = x.clamp(min=spread(scales, 16, 48) * grid[0], max=spread(scales, 16, 48) * grid[-1])
    assert_on_grid(clamped, actual, spread(scales, 16, 48), grid)


def test_nvfp4_scales_are_fp8_and_an_empty_group_stays_empty() -> None:
    x, factor = tokens(1), 8.0
    actual = fake_quantize(x, Activation(Element.FP4, 16, dynamic=False), torch.tensor(factor))
    stored = (factor * x.unflatten(1, (3, 16)).abs().amax(2) / 6).clamp(max=448).to(torch.float8_e4m3fn).float()
    scales = torch.where(stored == 0, 0.125, stored) / factor
    clamped = x.clamp(min=-6 * spread(scales, 16, 48), max=6 * spread(scales, 16, 48))
    assert_on_grid(clamped, actual, spread(scales, 16, 48), FP4_VALUES)
    assert not actual[4].any()


def test_fp4_rounds_ties_to_even_codes() -> None:
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert round_fp4(ties).tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    assert round_fp4(-ties).tolist() == [-0.0, -1.0, -1.0, -2.0, -2.0, -4.0, -4.0]
    assert round_fp4(torch.tensor([0.2500001, 4.9999995, 99.0])).tolist() == [0.5, 4.0, 6.0]


def test_fp4_and_e8m0_codes() -> None:
    packed = torch.tensor([[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]], dtype=torch.uint8)
    assert decode_fp4(packed, 16)[0].tolist() == [*E2M1, *(-value for value in E2M1)]
    assert decode_e8m0(torch.tensor([0, 126, 127, 254], dtype=torch.uint8)).tolist() == [2.0**-127, 0.5, 1.0, 2.0**127]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_keeps_the_dtype_and_does_not_divide_by_zero(dtype: torch.dtype) -> None:
    x = torch.zeros(2, 32, dtype=dtype)
    for how in (Activation(Element.FP8), Activation(Element.INT8), Activation(Element.INT8, symmetric=False)):
        assert fake_quantize(x, how).dtype is dtype and not fake_quantize(x, how).any()
