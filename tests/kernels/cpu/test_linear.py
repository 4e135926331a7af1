"""The C linear layers against float64 products over ugly shapes, and their exactness properties."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from int8_cases import integer_weight
from twofold.kernels.cpu import linear, linear_int8
from twofold.kernels.cpu.elementwise import silu_and_mul
from twofold.kernels.cpu.library import functions, unavailable
from twofold.kernels.cpu.panels import LowBitPanels
from twofold.kernels.problems import LinearProblem
from twofold.platforms import cpu_threads
from twofold.quant.canonical import DenseWeight, PackedWeight, dequantize, pack
from twofold.quant.scheme import Dense, Offset, WeightOnly

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=f"no compiled kernels: {unavailable()}")

SHAPES = [(1, 1), (3, 5), (31, 127), (32, 128), (33, 129), (64, 640), (100, 641), (160, 1300), (257, 48)]
ROWS = [1, 2, 3, 4, 5, 6, 7, 8, 12, 13, 24, 40]


def random_weight(
    bits: int, group_size: int, shape: tuple[int, int], *, symmetric: bool, act_order: bool
) -> PackedWeight:
    generator = torch.Generator().manual_seed(bits * 1000 + shape[0])
    scheme = WeightOnly(bits, group_size, symmetric, act_order)
    rows, columns = shape
    groups = scheme.num_groups(columns)
    return PackedWeight(
        scheme,
        shape,
        pack(torch.randint(0, 2**bits, shape, generator=generator), bits),
        torch.randn(rows, groups, generator=generator),
        None if symmetric else torch.randint(0, 2**bits, (rows, groups), generator=generator).to(torch.uint8),
        torch.randperm(columns, generator=generator).to(torch.int32) if act_order else None,
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_dense(shape, with_bias):
    generator = torch.Generator().manual_seed(sum(shape))
    weight = torch.randn(shape, generator=generator)
    bias = torch.randn(shape[0], generator=generator) if with_bias else None
    prepared = linear.prepare_dense(DenseWeight(weight), torch.float32)
    for rows in ROWS:
        wide = torch.randn(rows, shape[1] + 3, generator=generator)
        x = wide[:, 2 : 2 + shape[1]]
        expected = x.double() @ weight.double().T + (bias.double() if with_bias else 0)
        bound = x.double().abs() @ weight.double().abs().T * 1e-6 + 1e-6
        assert ((linear.run(x, prepared, bias) - expected).abs() <= bound).all()


def test_dense_takes_no_rows_and_any_strides():
    weight = torch.randn(40, 20, generator=torch.Generator().manual_seed(0))
    prepared = linear.prepare_dense(DenseWeight(weight.T.contiguous().T), torch.float32)
    assert linear.run(torch.empty(0, 20), prepared).shape == (0, 40)
    x = torch.randn(20, 6, generator=torch.Generator().manual_seed(1)).T
    torch.testing.assert_close(linear.run(x, prepared), x @ weight.T)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize(("shape", "group_size"), [((70, 96), 32), ((32, 1300), 16), ((33, 147), -1), ((40, 700), 128)])
@pytest.mark.parametrize("symmetric", [True, False])
def test_low_bit_equals_its_dequantized_matrix_bit_for_bit(bits, shape, group_size, symmetric):
    weight = random_weight(bits, group_size, shape, symmetric=symmetric, act_order=False)
    prepared = linear.prepare_low_bit(weight, torch.float32)
    dense = linear.prepare_dense(weight, torch.float32)
    generator = torch.Generator().manual_seed(3)
    bias = torch.randn(shape[0], generator=generator)
    for rows in ROWS:
        x = torch.randn(rows, shape[1], generator=generator)
        assert torch.equal(linear.run(x, prepared, bias), linear.run(x, dense, bias))


@pytest.mark.parametrize("bits", [3, 4, 7, 8])
@pytest.mark.parametrize(("shape", "group_size"), [((70, 96), 32), ((33, 147), -1), ((40, 700), 128)])
def test_offsets_instead_of_zeros(bits, shape, group_size):
    """Bit for bit the matrix of code * scale + offset, rounded once: the product of a 16-bit scale is exact."""
    generator = torch.Generator().manual_seed(6)
    scheme, (rows, columns) = Offset(bits, group_size), shape
    groups, size = scheme.num_groups(columns), scheme.resolved_group_size(columns)
    codes = torch.randint(0, 2**bits, shape, generator=generator)
    scales, offsets = torch.randn(2, rows, groups, generator=generator).half()
    spread = (each.double().repeat_interleave(size, dim=1)[:, :columns] for each in (scales, offsets))
    matrix = (codes * next(spread) + next(spread)).float()
    weight = PackedWeight(scheme, shape, pack(codes, bits), scales, offsets)
    assert torch.equal(dequantize(weight), matrix)
    prepared = linear.prepare_low_bit(weight, torch.float32)
    dense = linear.prepare_dense(DenseWeight(matrix), torch.float32)
    assert prepared.zeros is not None and prepared.zeros.dtype is torch.float16
    for count in ROWS:
        x = torch.randn(count, columns, generator=generator)
        assert torch.equal(linear.run(x, prepared), linear.run(x, dense))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scheme", [WeightOnly(4, 32), WeightOnly(2, 32, symmetric=False), Offset(8, 32)], ids=str)
def test_16_bit_scales_give_what_the_same_numbers_give_in_float32(scheme, dtype):
    weight = integer_weight(scheme, (70, 1344), scale_dtype=dtype)
    offsets = weight.zeros.float() if isinstance(scheme, Offset) else weight.zeros
    wide = replace(weight, scales=weight.scales.float(), zeros=offsets)
    generator = torch.Generator().manual_seed(10)
    for kernel, prepare, run in (
        ("exact", linear.prepare_low_bit, linear.run),
        ("int8", linear_int8.prepare, linear_int8.run),
    ):
        prepared, prepared_wide = prepare(weight, torch.float32), prepare(wide, torch.float32)
        for rows in ROWS:
            x = torch.randn(rows, 1344, generator=generator)
            assert torch.equal(run(x, prepared), run(x, prepared_wide)), kernel


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_scale(dtype):
    """Each number of the type as the scale of a weight of one, subnormal ones and infinities among them."""
    scales = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)[:, None]
    weight = PackedWeight(WeightOnly(8, -1), (len(scales), 4), pack(torch.full((len(scales), 4), 129), 8), scales)
    x = torch.tensor([[1.0, 0.0, 0.0, 0.0]])
    finite = scales.isfinite().flatten()
    result = linear.run(x, linear.prepare_low_bit(weight, torch.float32)).flatten()
    assert torch.equal(result[finite], scales.float().flatten()[finite]) and not result[~finite].isfinite().any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(3, 2), (33, 130), (100, 640), (160, 1300)])
def test_16_bit_floats_stay_so_and_equal_their_float32_matrix_bit_for_bit(dtype, shape):
    generator = torch.Generator().manual_seed(9)
    weight = (torch.randn(shape, generator=generator) * torch.logspace(-6, 3, shape[1])).to(dtype)
    prepared = linear.prepare_dense(DenseWeight(weight), torch.float32)
    wide = linear.prepare_dense(DenseWeight(weight.float()), torch.float32)
    assert isinstance(prepared, LowBitPanels) and prepared.codes.nbytes * 2 == wide.panels.nbytes
    bias = torch.randn(shape[0], generator=generator)
    for rows in ROWS:
        x = torch.randn(rows, shape[1], generator=generator)
        assert torch.equal(linear.run(x, prepared, bias), linear.run(x, wide, bias))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 4, 7, 13])
def test_every_16_bit_weight(dtype, rows):
    """Each number of the type in the first and in the second half of a word, subnormal ones among them."""
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    numbers = numbers[numbers.isfinite()].repeat_interleave(2).view(-1, 2)
    prepared = linear.prepare_dense(DenseWeight(numbers), torch.float32)
    for x in ([1.0, 0.0], [0.0, 1.0]):
        result = linear.run(torch.tensor([x]).expand(rows, 2).contiguous(), prepared)
        assert torch.equal(result, numbers[:, 0].float().expand(rows, -1))


PANEL_KINDS = [torch.float32, torch.bfloat16, torch.float16, WeightOnly(2, 32), WeightOnly(4, 32)]
PANEL_KINDS += [
    WeightOnly(4, 32, symmetric=False),
    WeightOnly(8, 32),
    WeightOnly(8, 32, symmetric=False),
    Offset(8, 32),
]


@pytest.mark.parametrize("kind", PANEL_KINDS, ids=str)
@pytest.mark.parametrize("panels", [1, 2, 3, 4, 5, 7, 9, 17])
def test_few_rows_give_what_many_give_however_many_panels_are_computed_together(kind, panels):
    """Of a last panel that is not full, and features that end within a sum, with bias and gate, on 1 to 3 threads."""
    generator = torch.Generator().manual_seed(panels)
    width = int(functions.twofold_panel_width())
    for columns, missing in ((32, 0), (96, 1), (672, 5), (1312, width - 1)):
        shape = panels * width - missing, columns
        if isinstance(kind, torch.dtype):
            prepared = linear.prepare_dense(
                DenseWeight(torch.randn(shape, generator=generator).to(kind)), torch.float32
            )
        else:
            prepared = linear.prepare_low_bit(integer_weight(kind, shape), torch.float32)
        x, bias = torch.randn(40, columns, generator=generator), torch.randn(shape[0], generator=generator)
        is_gated = panels % 2 == 0 and not missing
        whole = linear.run(x, prepared, bias)
        gated = silu_and_mul(whole) if is_gated else None
        for threads in (1, 2, 3):
            cpu_threads.set_num_threads(threads)
            for rows in (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13):
                part = x[7 : 7 + rows]
                assert torch.equal(linear.run(part, prepared, bias), whole[7 : 7 + rows]), (shape, rows, threads)
                if gated is not None:
                    assert torch.equal(
                        linear._run(part, prepared, bias, linear.gate_number("silu")), gated[7 : 7 + rows]
                    ), (
                        shape,
                        rows,
                        threads,
                    )


@pytest.mark.parametrize("value", ["inf", "-inf", "nan"])
def test_16_bit_floats_that_are_no_numbers(value):
    weight = torch.ones(40, 6, dtype=torch.float16)
    weight[3, 2] = float(value)
    result = linear.run(torch.ones(1, 6), linear.prepare_dense(DenseWeight(weight), torch.float32))
    assert torch.equal(result.nan_to_num(7.0), (torch.ones(1, 6) @ weight.float().T).nan_to_num(7.0))


def test_parts_of_several_types_become_float32():
    parts = [torch.randn(70, 64).to(dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.bfloat16)]
    problem = LinearProblem(scheme=Dense(), in_features=64, out_features=280, dtype=torch.float32)
    assembly = linear.DenseAssembly(problem)
    for index, part in enumerate(parts):
        assembly.put(70 * index, DenseWeight(part))
    whole = linear.prepare_dense(DenseWeight(torch.cat([part.float() for part in parts])), torch.float32)
    assert torch.equal(assembly.finish().panels, whole.panels)


def test_low_bit_with_act_order():
    weight = random_weight(4, 32, (48, 160), symmetric=False, act_order=True)
    x = torch.randn(9, 160, generator=torch.Generator().manual_seed(4))
    expected = x.double() @ dequantize(weight, torch.float64).T
    result = linear.run(x, linear.prepare_low_bit(weight, torch.float32)).double()
    torch.testing.assert_close(result, expected, atol=1e-3, rtol=1e-5)


@pytest.mark.parametrize("kind", ["dense", "low bit"])
def test_a_row_does_not_depend_on_its_batch_or_on_the_thread_count(kind):
    weight = random_weight(4, 32, (200, 1408), symmetric=True, act_order=False)
    prepare = linear.prepare_dense if kind == "dense" else linear.prepare_low_bit
    prepared = prepare(weight, torch.float32)
    x = torch.randn(37, 1408, generator=torch.Generator().manual_seed(5))
    whole = linear.run(x, prepared)
    threads = cpu_threads.num_threads()
    try:
        for count in (1, 3):
            cpu_threads.set_num_threads(count)
            for rows in (1, 2, 6, 13, 17):
                assert torch.equal(linear.run(x[20 : 20 + rows], prepared), whole[20 : 20 + rows])
    finally:
        cpu_threads.set_num_threads(threads)
