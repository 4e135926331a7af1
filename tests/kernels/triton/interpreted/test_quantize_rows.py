"""Activation quantization, alone and behind norms and gated activations, against the definitions in torch."""

from __future__ import annotations

import pytest
import torch
from eight_bit_cases import static_input
from torch import Tensor
from twofold.kernels import reference
from twofold.kernels.quantized_input import InputFormat, QuantizedInput
from twofold.kernels.triton import quantize_rows
from twofold.quant.scheme import Activation, Element

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
INT8, FP8 = Element.INT8, Element.FP8
PER_ROW = [
    (Activation(INT8), torch.int8),
    (Activation(INT8, symmetric=False), torch.int8),
    (Activation(INT8, 0, dynamic=False), torch.int8),
    (Activation(INT8, 0, dynamic=False, symmetric=False), torch.int8),
    (Activation(FP8), torch.float8_e4m3fn),
    (Activation(FP8), torch.float8_e4m3fnuz),
    (Activation(FP8), torch.bfloat16),
    (Activation(FP8, 0, dynamic=False), torch.float8_e4m3fn),
    (Activation(FP8, 128), torch.float8_e4m3fn),
    (Activation(FP8, 32, power_of_two=True), torch.float8_e4m3fnuz),
    (Activation(FP8, 32, power_of_two=True), torch.float16),
]
OTHERS = [
    (Activation(INT8, 0), torch.int8),
    (Activation(INT8, 0, symmetric=False), torch.int8),
    (Activation(FP8, 0), torch.float8_e4m3fn),
    (Activation(FP8, 48), torch.float8_e4m3fn),
    (Activation(FP8, 48), torch.float32),
    (Activation(INT8, 16, symmetric=False), torch.int8),
]


def randn(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def wanted(how: Activation, kind: torch.dtype) -> InputFormat:
    return InputFormat(how, kind, *static_input(how))


def assert_same(actual: QuantizedInput, expected: QuantizedInput, ties: float = 0.002) -> None:
    """Scales to float32's last bits; codes one step apart at most, and only where a value lies between two steps."""
    assert actual.codes.dtype is expected.codes.dtype and actual.codes.shape == expected.codes.shape
    assert actual.scale.shape == expected.scale.shape and actual.dtype is expected.dtype
    torch.testing.assert_close(actual.scale, expected.scale, rtol=1e-6, atol=0)
    assert (actual.zero is None) == (expected.zero is None)
    if actual.zero is not None and expected.zero is not None:
        assert (actual.zero - expected.zero).abs().max().item() <= 1
    if actual.codes.numel():
        ours, theirs = actual.codes.float(), expected.codes.float()
        step = torch.ones_like(theirs) if actual.codes.dtype is torch.int8 else (theirs.abs() / 8).clamp(min=2.0**-9)
        assert ((ours - theirs).abs() <= step).all()
        assert (ours != theirs).float().mean().item() <= ties


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("how", "kind"), PER_ROW + OTHERS, ids=str)
@pytest.mark.parametrize("shape", [(1, 144), (5, 100), (0, 64)])
def test_quantize(dtype: torch.dtype, how: Activation, kind: torch.dtype, shape: tuple[int, int]) -> None:
    x = randn(*shape, dtype=dtype) * torch.logspace(-2, 2, shape[0])[:, None].to(dtype)
    how_to = wanted(how, kind)
    actual = quantize_rows.quantize_activation(x, how, how_to.scale, how_to.zero, codes_dtype=kind)
    expected = reference.quantize_activation(x, how, how_to.scale, how_to.zero, codes_dtype=kind)
    if shape[0]:
        assert_same(actual, expected)
    assert actual.codes.shape == shape


@pytest.mark.parametrize(("how", "kind"), PER_ROW, ids=str)
@pytest.mark.parametrize("small_tiles", [False, True])
def test_behind_norms(how: Activation, kind: torch.dtype, small_tiles: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if small_tiles:
        monkeypatch.setattr(quantize_rows, "MAX_TILE", 64)
    dtype, (rows, columns) = torch.bfloat16, (3, 320)
    x, residual = (randn(rows, columns, dtype=dtype, seed=seed) for seed in (1, 2))
    weight, how_to = randn(columns, dtype=dtype), wanted(how, kind)
    actual = quantize_rows.rms_norm_quantized(x, weight, 1e-5, how_to, 1.0)
    assert_same(actual, reference.rms_norm_quantized(x, weight, 1e-5, how_to, 1.0), ties=0.01)
    kept = residual.clone()
    actual, total = quantize_rows.add_rms_norm_quantized(x, residual, weight, 1e-5, how_to)
    expected, expected_total = reference.add_rms_norm_quantized(x, residual, weight, 1e-5, how_to)
    assert torch.equal(total, expected_total) and torch.equal(residual, kept)
    assert_same(actual, expected, ties=0.01)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("how", "kind"), PER_ROW, ids=str)
def test_behind_gated_activations(dtype: torch.dtype, how: Activation, kind: torch.dtype) -> None:
    x, how_to = 3 * randn(2, 2 * 208, dtype=dtype), wanted(how, kind)
    actual = quantize_rows.silu_and_mul_quantized(x, how_to)
    assert_same(actual, reference.silu_and_mul_quantized(x, how_to), ties=0.01)
    for approximate in ("none", "tanh"):
        actual = quantize_rows.gelu_and_mul_quantized(x, how_to, approximate)
        assert_same(actual, reference.gelu_and_mul_quantized(x, how_to, approximate), ties=0.01)


def test_a_long_row_and_one_scale_of_many_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize_rows, "RANGE_BLOCK", 128)
    x = randn(5, 1000, dtype=torch.float16)[:, ::2]
    for how in (Activation(INT8, 0), Activation(INT8, 0, symmetric=False)):
        assert_same(quantize_rows.quantize_activation(x, how), reference.quantize_activation(x, how))
    monkeypatch.setattr(quantize_rows, "MAX_TILE", 128)
    for how in (Activation(INT8), Activation(FP8, 128)):
        assert_same(quantize_rows.quantize_activation(x, how), reference.quantize_activation(x, how))


def test_zeros_and_huge_values() -> None:
    x = torch.zeros(3, 64)
    x[1, 3], x[2] = 3e38, 1e-39
    for how, _ in PER_ROW[:2] + PER_ROW[4:5]:
        assert_same(quantize_rows.quantize_activation(x, how), reference.quantize_activation(x, how))


def test_rounding_to_e4m3_in_arithmetic_equals_the_cast() -> None:
    bits = torch.arange(2**16, dtype=torch.int32) << 15
    x = bits.view(torch.float32)
    x = x[x.isfinite() & (x.abs() <= 448)]
    x = torch.cat([x, x * 1.0001]).clamp(-448, 448)
    x = x[: x.numel() // 64 * 64].view(-1, 64)
    how = Activation(FP8, 0, dynamic=False)
    actual = quantize_rows.quantize_activation(x, how, torch.tensor(1.0), codes_dtype=torch.float32)
    assert torch.equal(actual.codes, x.to(torch.float8_e4m3fn).float())
