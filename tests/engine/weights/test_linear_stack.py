"""Modules that stream into one matrix: every kind of weight, kernels that take parts and kernels that do not."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from stored_tensors import StoredTensors
from torch import Tensor
from twofold.engine.weights.linear_stack import LinearStack
from twofold.kernels.kernel_set import KernelSet
from twofold.platforms import select_platform
from twofold.quant.canonical import (
    CanonicalWeight,
    DenseWeight,
    EightBitWeight,
    MicroScaledWeight,
    PackedWeight,
    dequantize,
    pack,
)
from twofold.quant.formats import detect_format
from twofold.quant.scheme import Activation, Element, Fp8, Int8, MicroScaled, WeightOnly

COLUMNS = 64
ROWS = (40, 24, 8)


def dense(rows: int, dtype: torch.dtype) -> CanonicalWeight:
    return DenseWeight(torch.randn(rows, COLUMNS).bfloat16())


def packed(rows: int, dtype: torch.dtype) -> CanonicalWeight:
    words = pack(torch.randint(0, 16, (rows, COLUMNS)), 4).T.contiguous().T
    return PackedWeight(WeightOnly(4, 32), (rows, COLUMNS), words, torch.rand(rows, 2).bfloat16())


def fp8(rows: int, dtype: torch.dtype) -> CanonicalWeight:
    """A scale per tensor, different in each: the stacked matrix has one per row."""
    codes = torch.randn(rows, COLUMNS).to(torch.float8_e4m3fn)
    return EightBitWeight(Fp8((-1, -1)), codes, torch.rand(1, 1) + 0.1)


def int8(rows: int, dtype: torch.dtype) -> CanonicalWeight:
    codes = torch.randint(-127, 127, (rows, COLUMNS), dtype=torch.int8)
    return EightBitWeight(Int8((1, -1), Activation(Element.INT8)), codes, torch.rand(rows, 1))


def mxfp4(rows: int, dtype: torch.dtype) -> CanonicalWeight:
    codes = torch.randint(0, 256, (rows, COLUMNS // 2), dtype=torch.uint8)
    exponents = torch.randint(120, 130, (rows, 2), dtype=torch.uint8)
    return MicroScaledWeight(MicroScaled(Element.FP4, 32, True), (rows, COLUMNS), codes, exponents)


def stack_of(dtype: torch.dtype, rows: int) -> tuple[LinearStack, KernelSet]:
    platform = select_platform("cpu")
    kernels = KernelSet(platform.spec)
    return LinearStack(kernels, dtype, platform.device, rows), kernels


@pytest.mark.parametrize("make", [dense, packed, fp8, int8, mxfp4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_product_of_all_parts(make: Callable[[int, torch.dtype], CanonicalWeight], dtype: torch.dtype) -> None:
    torch.manual_seed(5)
    weights = [make(rows, dtype) for rows in ROWS]
    stack, kernels = stack_of(dtype, sum(ROWS))
    assert all(stack.put(weight) for weight in weights)
    outline, prepared = stack.finish()
    assert outline.shape == (sum(ROWS), COLUMNS)
    x = torch.randn(3, COLUMNS).to(dtype)
    found = kernels.select("linear", stack._problem(outline))(x, prepared, None)
    expected = x.double() @ torch.cat([dequantize(weight, torch.float64) for weight in weights]).T
    limit = 0.02 if dtype is torch.bfloat16 or make is int8 else 1e-5  # int8 rounds its input, too
    assert ((found.double() - expected).norm() / expected.norm()).item() < limit


def test_a_matrix_in_runs_of_rows_is_the_matrix() -> None:
    matrix = torch.randn(72, COLUMNS)
    for dtype in (torch.float32, torch.bfloat16):
        stack, kernels = stack_of(dtype, 72)
        buffer = torch.empty(10, COLUMNS)
        for first in range(0, 72, 10):  # the reader's buffer is overwritten by the next rows
            rows = buffer[: min(10, 72 - first)].copy_(matrix[first : first + 10])
            assert stack.put(DenseWeight(rows))
        outline, prepared = stack.finish()
        found = kernels.select("linear", stack._problem(outline))(torch.eye(COLUMNS, dtype=dtype), prepared, None)
        assert torch.equal(found.T, matrix.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_cannot_share_a_matrix(dtype: torch.dtype) -> None:
    stack, _ = stack_of(dtype, 80)
    assert stack.put(packed(40, dtype)) and not stack.put(dense(40, dtype))
    static = Fp8((-1, -1), Activation(Element.FP8, 0, dynamic=False))

    def with_input(scale: float) -> CanonicalWeight:
        codes = torch.randn(40, COLUMNS).to(torch.float8_e4m3fn)
        return EightBitWeight(static, codes, torch.ones(1, 1), input_scale=torch.tensor(scale))

    stack, _ = stack_of(dtype, 80)
    assert stack.put(with_input(1.0)) and not stack.put(with_input(2.0))


def test_formats_say_what_can_be_read_in_pieces() -> None:
    plain, codes = torch.randn(4, 64).bfloat16(), torch.randn(4, 64).to(torch.float8_e4m3fn)
    source = StoredTensors(
        {"a.weight": plain, "b.weight": codes, "b.weight_scale": torch.ones(()), "c.weight": plain[0]}
    )
    source.tensors |= {"d.weight": plain, "d.weight_scale": torch.ones(())}
    layout = detect_format({"quant_method": "fp8"})
    assert [layout.plain_tensor(source, name) for name in "abcd"] == ["a.weight", None, None, None]


def test_a_view_is_copied_where_the_layout_must_be_contiguous() -> None:
    words = torch.randint(0, 2**30, (8, 16), dtype=torch.int32)
    tensors: dict[str, Tensor] = {"m.qweight": words, "m.scales": torch.rand(2, 16).half()}
    tensors |= {"m.qzeros": torch.randint(0, 2**30, (2, 2), dtype=torch.int32)}
    layout = detect_format({"quant_method": "gptq", "bits": 4, "group_size": 32})
    strided = layout.load_as_stored(StoredTensors(tensors), "m", torch.float32)
    whole = layout.load(StoredTensors(tensors), "m", torch.float32)
    assert isinstance(strided, PackedWeight) and isinstance(whole, PackedWeight)
    assert strided.qweight.data_ptr() == words.data_ptr() and whole.qweight.is_contiguous()
    assert torch.equal(strided.qweight, whole.qweight)


def test_joining_imports_no_compiler() -> None:
    """torch.cat of outlines would import torch's compiler: 2 seconds of every start."""
    program = """
import sys, torch
from twofold.kernels.kernel_set import KernelSet
from twofold.platforms import select_platform
from twofold.quant.canonical import DenseWeight
from twofold.engine.weights.linear_stack import LinearStack
stack = LinearStack(KernelSet(select_platform("cpu").spec), torch.float32, torch.device("cpu"), 8)
assert all(stack.put(DenseWeight(torch.ones(4, 8))) for _ in range(2))
stack.finish()
assert "torch._dynamo" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
