"""Panels filled part by part hold, bit for bit, what torch makes of the weights."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from twofold.kernels.cpu.library import functions, unavailable
from twofold.kernels.cpu.linear import low_bit_bytes
from twofold.kernels.cpu.panels import DenseAssembly, DensePanels, LowBitAssembly, widened
from twofold.kernels.problems import LinearProblem
from twofold.quant.canonical import (
    CanonicalWeight,
    DenseWeight,
    EightBitWeight,
    MicroScaledWeight,
    PackedWeight,
    dequantize,
    int8_as_packed,
    merge,
    pack,
    unpack,
)
from twofold.quant.scheme import Activation, Dense, Element, Fp8, Int8, MicroScaled, Offset, WeightOnly

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=f"no compiled kernels: {unavailable()}")

PARTS = [(70, 200), (1, 200), (33, 200)]
GENERATOR = torch.Generator().manual_seed(3)


def as_matrix(panels: Tensor, rows: int) -> Tensor:
    """[ceil(N/PANEL), C, PANEL] back to [N, C]; what lies beyond N must be zero."""
    matrix = panels.transpose(1, 2).flatten(0, 1)
    assert not matrix[rows:].any(), "padding is not zero"
    return matrix[:rows]


def put_all(assembly: DenseAssembly | LowBitAssembly, parts: Sequence[CanonicalWeight]) -> None:
    first = 0
    for part in parts:
        assembly.put(first, part)
        first += part.shape[0]


def problem(scheme: object, parts: Sequence[CanonicalWeight]) -> LinearProblem:
    rows, columns = sum(part.shape[0] for part in parts), parts[0].shape[1]
    return LinearProblem(scheme=scheme, in_features=columns, out_features=rows, dtype=torch.float32)


def check_dense(parts: Sequence[CanonicalWeight]) -> None:
    assembly = DenseAssembly(problem(Dense(), parts))
    put_all(assembly, parts)
    expected = torch.cat([dequantize(part) for part in parts])
    panels = assembly.finish()
    if isinstance(panels, DensePanels):
        matrix = panels.panels
    else:
        matrix = widened(panels.codes, {16: torch.bfloat16, 17: torch.float16}[panels.bits])
    found = as_matrix(matrix, len(expected))
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_floats(dtype: torch.dtype) -> None:
    check_dense([DenseWeight(torch.randn(shape, generator=GENERATOR).to(dtype)) for shape in PARTS])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_float(dtype: torch.dtype) -> None:
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).view(256, 256)
    check_dense([DenseWeight(torch.where(bits.isnan(), torch.zeros_like(bits), bits))])


def test_transposed_floats() -> None:
    check_dense(
        [
            DenseWeight(torch.randn(200, 70, generator=GENERATOR).to(dtype).T)
            for dtype in (torch.float32, torch.bfloat16)
        ]
    )


def fp8(shape: tuple[int, int]) -> Tensor:
    return torch.randn(shape, generator=GENERATOR).to(torch.float8_e4m3fn)


@pytest.mark.parametrize("block", [(-1, -1), (1, -1), (1, 40), (16, 128)])
def test_fp8(block: tuple[int, int]) -> None:
    scheme = Fp8(block)
    for dtype in (torch.float32, torch.bfloat16):
        scales = [torch.rand(scheme.num_blocks(shape), generator=GENERATOR).to(dtype) for shape in PARTS]
        check_dense([EightBitWeight(scheme, fp8(shape), scale) for shape, scale in zip(PARTS, scales, strict=True)])


@pytest.mark.parametrize(("element", "power_of_two"), [(Element.FP4, True), (Element.FP4, False), (Element.FP8, True)])
def test_micro_scaled(element: Element, power_of_two: bool) -> None:
    scheme = MicroScaled(element, 16, power_of_two)
    parts = []
    for rows, columns in PARTS:
        codes = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, generator=GENERATOR)
        codes = codes if element is Element.FP4 else fp8((rows, columns))
        groups = (rows, -(-columns // 16))
        scales = (
            torch.randint(110, 140, groups, dtype=torch.uint8, generator=GENERATOR) if power_of_two else fp8(groups)
        )
        divisor = None if power_of_two else torch.full((1, 1), 3.7)
        parts.append(MicroScaledWeight(scheme, (rows, columns), codes, scales, divisor))
    check_dense(parts)


@pytest.mark.parametrize("columns", [200, 199])
@pytest.mark.parametrize("block", [(-1, -1), (1, -1), (1, 40)])
@pytest.mark.parametrize("symmetric", [True, False])
def test_int8(columns: int, block: tuple[int, int], symmetric: bool) -> None:
    scheme = Int8(block, Activation(Element.INT8), symmetric)
    parts: list[CanonicalWeight] = []
    for rows, _ in PARTS:
        shape = (rows, columns)
        sizes = scheme.num_blocks(shape)
        codes = torch.randint(-128, 128, shape, dtype=torch.int8, generator=GENERATOR)
        zeros = None if symmetric else torch.randint(-99, 99, sizes, dtype=torch.int8, generator=GENERATOR)
        parts.append(EightBitWeight(scheme, codes, torch.rand(sizes, generator=GENERATOR), zeros))
    assembly = LowBitAssembly(problem(scheme, parts))
    put_all(assembly, parts)
    check_low_bit(assembly, [int8_as_packed(part) for part in parts], 8)  # type: ignore[arg-type]
    check_dense(parts)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("transposed", [False, True])
def test_packed(bits: int, transposed: bool) -> None:
    """A stored matrix may come as the view that it is: GPTQ's is the canonical one, transposed."""
    scheme, parts = WeightOnly(bits, 40, symmetric=False), []
    for rows, columns in PARTS:
        words = pack(torch.randint(0, 2**bits, (rows, columns), generator=GENERATOR), bits)
        words = words.T.contiguous().T if transposed else words
        scales = torch.rand((rows, 5), generator=GENERATOR).half()
        zeros = torch.randint(0, 2**bits, (rows, 5), generator=GENERATOR).to(torch.uint8)
        parts.append(PackedWeight(scheme, (rows, columns), words, scales, zeros))
    assembly = LowBitAssembly(problem(scheme, parts))
    put_all(assembly, parts)
    check_low_bit(assembly, parts, bits)
    check_dense(parts)


def check_low_bit(assembly: LowBitAssembly, parts: Sequence[PackedWeight], bits: int) -> None:
    whole, found = merge(list(parts))[0], assembly.finish()
    assert isinstance(whole, PackedWeight)
    rows, columns = whole.shape
    codes = as_matrix(found.codes, rows)
    assert torch.equal(unpack(codes, bits, columns), unpack(whole.qweight, bits, columns))
    assert torch.equal(as_matrix(found.scales.float(), rows), whole.scales.float().expand(rows, found.scales.shape[1]))
    assert (found.zeros is None) == (whole.zeros is None)
    if found.zeros is not None and whole.zeros is not None:
        assert torch.equal(as_matrix(found.zeros, rows), whole.zeros.expand(rows, found.zeros.shape[1]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stored_by_columns", [False, True])
def test_scales_and_offsets_of_16_bits_stay_as_they_are(dtype: torch.dtype, stored_by_columns: bool) -> None:
    scheme, parts = Offset(4, 40), []
    for rows, columns in PARTS:
        words = pack(torch.randint(0, 16, (rows, columns), generator=GENERATOR), 4)
        scales, offsets = torch.randn(2, rows, 5, generator=GENERATOR).to(dtype)
        if stored_by_columns:
            scales, offsets = scales.T.contiguous().T, offsets.T.contiguous().T
        parts.append(PackedWeight(scheme, (rows, columns), words, scales, offsets))
    assembly = LowBitAssembly(problem(scheme, parts))
    put_all(assembly, parts)
    found, rows = assembly.finish(), sum(shape[0] for shape in PARTS)
    assert found.zeros is not None
    assert torch.equal(as_matrix(found.scales, rows), torch.cat([part.scales for part in parts]))
    offsets = [part.zeros for part in parts if part.zeros is not None]
    assert torch.equal(as_matrix(found.zeros, rows), torch.cat(offsets))


def test_scales_of_several_types_become_float32() -> None:
    scheme, parts = Offset(4, 40), []
    for (rows, columns), dtype in zip(PARTS, (torch.float16, torch.bfloat16, torch.float16), strict=True):
        words = pack(torch.randint(0, 16, (rows, columns), generator=GENERATOR), 4)
        scales, offsets = torch.randn(2, rows, 5, generator=GENERATOR).to(dtype)
        parts.append(PackedWeight(scheme, (rows, columns), words, scales, offsets))
    assembly = LowBitAssembly(problem(scheme, parts))
    put_all(assembly, parts)
    found, rows = assembly.finish(), sum(shape[0] for shape in PARTS)
    assert found.zeros is not None
    assert torch.equal(as_matrix(found.scales, rows), torch.cat([part.scales.float() for part in parts]))
    offsets = [part.zeros.float() for part in parts if part.zeros is not None]
    assert torch.equal(as_matrix(found.zeros, rows), torch.cat(offsets))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    "scheme",
    [WeightOnly(4, 32), WeightOnly(3, 40, symmetric=False), Offset(8, 32), WeightOnly(4, -1, False, act_order=True)],
    ids=str,
)
def test_the_memory_is_what_was_planned(scheme: WeightOnly | Offset, dtype: torch.dtype) -> None:
    rows, columns = 70, 160
    groups = scheme.num_groups(columns)
    scales = torch.rand((rows, groups), generator=GENERATOR).to(dtype)
    zeros = scales if isinstance(scheme, Offset) else torch.ones((rows, groups), dtype=torch.uint8)
    words = pack(torch.zeros((rows, columns), dtype=torch.int64), scheme.bits)
    perm = torch.arange(columns, dtype=torch.int32) if scheme.act_order else None
    weight = PackedWeight(scheme, (rows, columns), words, scales, None if scheme.symmetric else zeros, perm)
    assembly = LowBitAssembly(problem(scheme, [weight]))
    assembly.put(0, weight)
    found = assembly.finish()
    kept = sum(each.nbytes for each in (found.codes, found.scales, found.zeros, found.perm) if each is not None)
    assert low_bit_bytes(problem(scheme, [weight]), weight.nbytes) == kept


def test_the_panel_width_is_what_the_library_says() -> None:
    width = functions.twofold_panel_width()
    assembly = DenseAssembly(problem(Dense(), [DenseWeight(torch.ones(width + 1, 3))]))
    assembly.put(0, DenseWeight(torch.ones(width + 1, 3)))
    assert assembly.finish().panels.shape == (2, 3, width)
