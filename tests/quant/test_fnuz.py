"""e4m3fn bits on e4m3fnuz chips: every code keeps its value."""

from __future__ import annotations

import pytest
import torch
from twofold.errors import CheckpointError
from twofold.quant.canonical import EightBitWeight
from twofold.quant.fnuz import to_fnuz, weight_to_fnuz
from twofold.quant.scheme import Activation, Element, Fp8


def e4m3fn(code: int) -> float:
    """The value of a code by the OCP definition: bias 7."""
    sign, exponent, mantissa = -1.0 if code & 0x80 else 1.0, code >> 3 & 0xF, code & 7
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def test_all_256_codes() -> None:
    finite = [code for code in range(256) if code & 0x7F != 0x7F]
    codes = torch.tensor([finite], dtype=torch.uint8).view(torch.float8_e4m3fn)
    converted, scales = to_fnuz(codes, torch.tensor([[0.25]]))
    assert converted.dtype is torch.float8_e4m3fnuz
    values = (converted.float() * scales)[0].tolist()
    assert values == [e4m3fn(code) * 0.25 for code in finite]


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_nan_is_refused(code: int) -> None:
    with pytest.raises(CheckpointError, match="1 of 2 fp8 weights are NaN"):
        to_fnuz(torch.tensor([[1, code]], dtype=torch.uint8).view(torch.float8_e4m3fn), torch.ones(1, 1))


def test_a_weight_with_blocks_and_a_static_input() -> None:
    scheme = Fp8((2, 3), Activation(Element.FP8, 0, dynamic=False))
    codes = torch.randn(4, 5).to(torch.float8_e4m3fn)
    weight = EightBitWeight(scheme, codes, torch.rand(2, 2), input_scale=torch.tensor(0.5))
    converted = weight_to_fnuz(weight)
    assert torch.equal(converted.dequantize(), weight.dequantize())
    assert converted.input_scale is not None and converted.input_scale.item() == 1.0
