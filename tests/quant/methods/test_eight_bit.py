"""8-bit rounding against its definition in float64."""

from __future__ import annotations

import pytest
import torch
from twofold.quant.methods.eight_bit import quantize_eight_bit
from twofold.quant.scheme import Activation, Element, Fp8, Int8

BLOCKS = [(-1, -1), (1, -1), (1, 32), (48, 32), (64, 64)]
# Between neighbouring e4m3 values, seen from the middle of them: 3 bits of mantissa.
HALF_STEP = 2.0**-4


@pytest.mark.parametrize("block", BLOCKS)
def test_fp8_codes_are_the_nearest(block: tuple[int, int]) -> None:
    weight = torch.randn(80, 96, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 1, 96)
    weight[16:32] = 0
    result = quantize_eight_bit(weight, Fp8(block))
    rows, columns = (side if size == -1 else size for side, size in zip(weight.shape, block, strict=True))
    for i in range(0, 80, rows):
        for j in range(0, 96, columns):
            part = weight[i : i + rows, j : j + columns].double()
            got = result.dequantize()[i : i + rows, j : j + columns].double()
            smallest, scale = float(part.abs().max()) / 448, float(result.scales[i // rows, j // columns])
            # Numbers below 2**-6 have steps of 2**-9.
            assert bool(((got - part).abs() <= part.abs() * HALF_STEP * 1.001 + scale * 2.0**-10).all())
            if smallest:
                assert smallest * 0.999999 <= scale < 2 * smallest
                plain = (part / smallest).to(torch.float32).to(torch.float8_e4m3fn).double() * smallest
                assert float((got - part).norm()) <= float((plain - part).norm()) * (1 + 1e-5)
    assert bool((result.dequantize()[16:32] == 0).all()) and bool(result.scales.isfinite().all())


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("columns", [-1, 32])
def test_int8(symmetric: bool, columns: int) -> None:
    weight = torch.randn(40, 96, generator=torch.Generator().manual_seed(1)) + (0 if symmetric else 1)
    scheme = Int8((1, columns), Activation(Element.INT8), symmetric)
    result = quantize_eight_bit(weight, scheme)
    assert result.codes.dtype is torch.int8 and (result.zeros is None) == symmetric
    spread = result.scales.double().repeat_interleave(96 if columns == -1 else columns, 1)
    largest = (weight.double() - result.dequantize().double()).abs() / spread
    assert float(largest.median()) < 0.3 and float((result.dequantize() - weight).norm() / weight.norm()) < 0.01


def test_a_static_input_scale_is_kept() -> None:
    scheme = Fp8((-1, -1), Activation(Element.FP8, 0, dynamic=False))
    result = quantize_eight_bit(torch.randn(8, 8), scheme, torch.tensor(0.25))
    assert result.input_scale is not None and float(result.input_scale) == 0.25
