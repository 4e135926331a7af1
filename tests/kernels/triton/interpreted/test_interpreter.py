"""The repaired interpreter against torch's own conversions and arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

NARROW = [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz]


@triton.jit
def cast_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    tl.store(y_ptr + index, tl.load(x_ptr + index).to(y_ptr.dtype.element_ty))


@triton.jit
def arithmetic_kernel(x_ptr, y_ptr, out_ptr, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    x, y = tl.load(x_ptr + index), tl.load(y_ptr + index)
    tl.store(out_ptr + index, x * y + x)
    tl.store(out_ptr + BLOCK + index, tl.where(x < y, x - y, y))


@triton.jit
def dot_kernel(x_ptr, y_ptr, out_ptr, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    tl.store(out_ptr + index, tl.dot(tl.load(x_ptr + index), tl.load(y_ptr + index), input_precision="ieee"))


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    out = torch.empty(x.shape, dtype=dtype)
    cast_kernel[(1,)](x, out, BLOCK=x.numel())
    return out


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    both_nan = torch.isnan(actual.float()) & torch.isnan(expected.float())
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[actual.element_size()]
    assert ((actual.view(integers) == expected.view(integers)) | both_nan).all()


def ugly_values() -> Tensor:
    generator = torch.Generator().manual_seed(7)
    spread = torch.randn(500, generator=generator) * torch.logspace(-9, 2, 500)
    ties = torch.tensor([0.49, 0.0, -0.0, 1.00390625, 1.01171875, 3.1415927, 240.0, -224.0, 1e-40, -0.49, 17.0, 19.0])
    return torch.cat([spread, ties])


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_narrowing_rounds_as_torch_does(dtype: torch.dtype) -> None:
    values = ugly_values()
    assert_same_bits(cast(values, dtype), values.to(dtype))


@pytest.mark.parametrize("dtype", [dtype for dtype in NARROW if dtype.itemsize == 1], ids=str)
def test_every_fp8_code_widens_as_torch_does(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(dtype)
    assert_same_bits(cast(codes, torch.float32), codes.float())


def test_integers_become_bfloat16() -> None:
    values = torch.arange(-512, 512, dtype=torch.int32)
    assert_same_bits(cast(values, torch.bfloat16), values.bfloat16())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_arithmetic_is_on_values_not_bit_patterns(dtype: torch.dtype) -> None:
    x, y = (torch.randn(64, generator=torch.Generator().manual_seed(seed)).to(dtype) for seed in (1, 2))
    out = torch.empty(128, dtype=dtype)
    arithmetic_kernel[(1,)](x, y, out, BLOCK=64)
    assert_same_bits(out[:64], x * y + x)
    assert_same_bits(out[64:], torch.where(x < y, x - y, y))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_dot_multiplies_values(dtype: torch.dtype) -> None:
    x, y = (torch.randn(16, 16, generator=torch.Generator().manual_seed(seed)).to(dtype) for seed in (3, 4))
    out = torch.empty(16, 16)
    dot_kernel[(1,)](x, y, out, BLOCK=16)
    torch.testing.assert_close(
        out.double(), x.double() @ y.double(), rtol=1e-3 if dtype.itemsize == 2 else 1e-5, atol=1e-5
    )


def test_repairing_twice_changes_nothing() -> None:
    from triton.runtime.interpreter import InterpreterBuilder
    from triton_interpreter import repair

    before: Callable[..., Any] = InterpreterBuilder.binary_op
    repair()
    assert InterpreterBuilder.binary_op is before
