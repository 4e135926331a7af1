"""Products in bfloat16: the reference's of rounded inputs and weights, the same bits in any batch, refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from expert_cases import random_ids, random_weights
from int8_cases import integer_weight
from small_float_cases import weight_of
from torch import Tensor
from twofold.errors import ConfigError
from twofold.kernels import reference
from twofold.kernels.cpu import bf16_rows, linear, linear_bf16
from twofold.kernels.cpu.elementwise import silu_and_mul
from twofold.kernels.kernel_set import KernelSet
from twofold.kernels.problems import ExpertLinearProblem, LinearProblem
from twofold.platforms import cpu_threads
from twofold.platforms.cpu import CpuPlatform
from twofold.quant.canonical import CanonicalWeight, DenseWeight, PackedWeight, dequantize
from twofold.quant.scheme import Activation, Dense, Element, Fp8, Int8, MicroScaled, Offset, Scheme, WeightOnly

SHAPES = [(33, 160), (100, 1312), (257, 48), (70, 700), (1, 8), (64, 31)]
ROWS = (1, 2, 3, 15, 16, 17, 31, 32, 33, 48, 49, 200)
INTEGERS = [
    WeightOnly(4, 32),
    WeightOnly(4, 16, symmetric=False),
    WeightOnly(4, 48),
    WeightOnly(2, 32),
    WeightOnly(3, -1),
    WeightOnly(8, 32),
    WeightOnly(5, 16, symmetric=False),
    Offset(4, 32),
    Offset(8, 48),
    Offset(2, 16),
]
SMALL_FLOATS = [
    (Fp8((-1, -1)), torch.float32),
    (Fp8((1, 32)), torch.float16),
    (MicroScaled(Element.FP4, 32, True), torch.uint8),
    (MicroScaled(Element.FP4, 16, False), torch.float8_e4m3fn),
]

needs_tiles = pytest.mark.skipif(
    linear_bf16.missing() is not None, reason=f"no products in bfloat16: {linear_bf16.missing()}"
)


def inputs(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows + columns))


def check(weight: CanonicalWeight, rows: tuple[int, ...] = ROWS) -> None:
    """Against float64 sums of rounded numbers, with and without a bias."""
    num_rows, columns = weight.shape
    prepared = linear_bf16.prepare(weight, torch.float32)
    matrix = dequantize(weight, torch.float32)
    # Where a sum of code and offset nearly vanishes, or two roundings meet, a weight may be its neighbour.
    unsure = matrix.abs() / 256
    if isinstance(weight.scheme, Offset):
        unsure = unsure + 1e-6 * (2**weight.scheme.bits * weight.scales.float().abs().amax())  # type: ignore[union-attr]
    rounded = matrix.to(torch.bfloat16)
    exact = isinstance(weight, DenseWeight | PackedWeight) and not isinstance(weight.scheme, Offset)
    x, bias = inputs(max(rows), columns), inputs(1, num_rows)[0]
    size = x.bfloat16().abs().double() @ (rounded.abs().double() if exact else unsure.double()).T
    wanted = reference.linear(x.bfloat16().double(), rounded.double())
    for count in rows:
        for given in (None, bias):
            result = linear_bf16.run(x[:count], prepared, given)
            expected = wanted[:count] if given is None else wanted[:count] + given
            bound = (2e-6 if exact else 1.0) * size[:count] + 1e-6 * (expected.abs() + bias.abs())
            assert ((result - expected).abs() <= bound).all(), (count, given is None)


@needs_tiles
@pytest.mark.parametrize("scheme", INTEGERS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_integers(scheme: WeightOnly | Offset, shape: tuple[int, int]) -> None:
    for dtype in (torch.float16, torch.float32):
        check(integer_weight(scheme, shape, scale_dtype=dtype))


@needs_tiles
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dense(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    check(DenseWeight(inputs(*shape).to(dtype)))


@needs_tiles
@pytest.mark.parametrize(("scheme", "scales"), SMALL_FLOATS, ids=str)
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape[1] % 2 == 0], ids=str)
def test_small_floats(scheme: Fp8 | MicroScaled, scales: torch.dtype, shape: tuple[int, int]) -> None:
    check(weight_of(scheme, scales, shape))


@needs_tiles
def test_act_order() -> None:
    weight = integer_weight(WeightOnly(4, 32, act_order=True), (40, 200))
    assert weight.perm is not None
    plain = replace(weight, perm=None, scheme=replace(weight.scheme, act_order=False))
    x = inputs(37, 200)
    result = linear_bf16.run(x, linear_bf16.prepare(weight, torch.float32))
    assert torch.equal(result, linear_bf16.run(x[:, weight.perm.long()], linear_bf16.prepare(plain, torch.float32)))


@needs_tiles
@pytest.mark.parametrize(
    "scheme", [WeightOnly(4, 32), WeightOnly(4, 128), WeightOnly(8, -1, False), Offset(4, 16)], ids=str
)
def test_every_weight_is_rounded_once(scheme: WeightOnly | Offset) -> None:
    """Times one, a product is the rounded weight: what the exact kernel gives, to the nearest bfloat16."""
    weight = integer_weight(scheme, (70, 256), scale_dtype=torch.float16)
    one = torch.eye(256)
    exact = linear.run(one, linear.prepare_low_bit(weight, torch.float32))
    assert torch.equal(linear_bf16.run(one, linear_bf16.prepare(weight, torch.float32)), exact.bfloat16().float())


@needs_tiles
@pytest.mark.parametrize(
    "scheme",
    [
        *INTEGERS[:2],
        WeightOnly(4, 64),
        WeightOnly(4, -1),
        WeightOnly(2, 32),
        WeightOnly(8, 32),
        Offset(4, 48),
        Dense(),
        Fp8((-1, -1)),
        MicroScaled(Element.FP4, 32, True),
        MicroScaled(Element.FP4, 16, False),
    ],
    ids=str,
)
@pytest.mark.parametrize("columns", [96, 1450, 6000])
def test_a_row_depends_neither_on_its_batch_nor_on_the_threads(scheme: Scheme, columns: int) -> None:
    if isinstance(scheme, Fp8):
        weight: CanonicalWeight = weight_of(scheme, torch.float32, (75, columns))
    elif isinstance(scheme, MicroScaled):
        weight = weight_of(scheme, torch.uint8 if scheme.group_size == 32 else torch.float8_e4m3fn, (75, columns))
    elif isinstance(scheme, Dense):
        weight = DenseWeight(inputs(75, columns))
    else:
        weight = integer_weight(scheme, (75, columns))
    prepared, x, bias = linear_bf16.prepare(weight, torch.float32), inputs(530, columns), inputs(1, 75)[0]
    whole = linear_bf16.run(x, prepared, bias)
    for threads in (1, 2, 3):
        cpu_threads.set_num_threads(threads)
        for first, count in (
            (0, 1),
            (7, 2),
            (17, 15),
            (100, 16),
            (3, 17),
            (200, 33),
            (60, 48),
            (150, 49),
            (90, 400),
            (515, 15),
        ):
            assert torch.equal(linear_bf16.run(x[first : first + count], prepared, bias), whole[first : first + count])


def rounded(x: Tensor) -> Tensor:
    """x as norms hand it to products, with what must not be read behind it."""
    rows = bf16_rows.empty_rows(*x.shape)
    steps = -(-x.shape[1] // bf16_rows.STEP_K) * bf16_rows.STEP_K
    whole = rows.as_strided((len(x), rows.stride(0)), rows.stride())
    whole[:] = float("nan")
    whole[:, :steps] = 0
    rows[:] = x
    return rows


@needs_tiles
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_more_rows_than_a_piece_of_work_takes(threads: int) -> None:
    weight = integer_weight(WeightOnly(4, 32), (300, 160))
    prepared, x = linear_bf16.prepare(weight, torch.float32), inputs(2100, 160)
    few = torch.cat([linear_bf16.run(part, prepared) for part in x.split(32)])
    cpu_threads.set_num_threads(threads)
    for count in (49, 1024, 1025, 1057, 2100):
        assert torch.equal(linear_bf16.run(x[:count], prepared), few[:count])


@needs_tiles
@pytest.mark.parametrize("scheme", [*INTEGERS[:2], WeightOnly(8, 32), Offset(4, 16), Dense(), Fp8((-1, -1))], ids=str)
@pytest.mark.parametrize("shape", [(64, 96), (100, 1312), (256, 62), (70, 2400)], ids=str)
def test_rounded_rows_give_what_floats_give(scheme: Scheme, shape: tuple[int, int]) -> None:
    """Also gated, where gates and ups have panels of their own."""
    if isinstance(scheme, Fp8):
        weight: CanonicalWeight = weight_of(scheme, torch.float32, shape)
    elif isinstance(scheme, Dense):
        weight = DenseWeight(inputs(*shape))
    else:
        weight = integer_weight(scheme, shape)
    prepared, x = linear_bf16.prepare(weight, torch.float32), inputs(1090, shape[1])
    assert linear_bf16.input_dtype(prepared) is torch.bfloat16
    for bias in (None, inputs(1, shape[0])[0]):
        for count in (5, 32, 33, 48, 49, 95, 1090):
            few = [linear_bf16.run(part, prepared, bias) for part in x[:count].split(32)]
            assert torch.equal(linear_bf16.run(rounded(x[:count]), prepared, bias), torch.cat(few))
            gated = linear_bf16.run_gated(rounded(x[:count]), prepared, bias)
            wanted = torch.cat([silu_and_mul(part) for part in few])
            many = count > bf16_rows.FEW_ROWS and shape[0] % 64 == 0
            assert gated.dtype is (torch.bfloat16 if many else torch.float32)
            assert torch.equal(gated, wanted.to(gated.dtype))


@needs_tiles
def test_act_order_finds_its_features_in_floats_alone() -> None:
    prepared = linear_bf16.prepare(integer_weight(WeightOnly(4, 32, act_order=True), (64, 96)), torch.float32)
    assert linear_bf16.input_dtype(prepared) is None
    with pytest.raises(AssertionError, match="in the weight's order"):
        linear_bf16.run(rounded(inputs(80, 96)), prepared)


@needs_tiles
@pytest.mark.parametrize("scheme", [WeightOnly(4, 32), WeightOnly(4, 64), WeightOnly(2, 32)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_scales_of_any_size(scheme: WeightOnly, dtype: torch.dtype) -> None:
    """Zeros, numbers near the ends of the floats' range, negative ones, infinity and NaN: few rows as many."""
    weight = integer_weight(scheme, (64, 640), scale_dtype=dtype)
    assert isinstance(weight, PackedWeight)
    scales, sign = weight.scales.clone(), torch.tensor([1.0, -1.0])
    ends = torch.finfo(dtype)
    scales[:, 0::5] *= sign[torch.arange(64) % 2, None].to(dtype)
    scales[3, 1], scales[40, 2] = 0.0, ends.tiny / 2
    scales[50:, 3] = ends.tiny * 1.37
    scales[7, 4], scales[8, 4], scales[9, 4] = ends.max, float("inf"), float("nan")
    if dtype is not torch.float16:
        scales[20, 5:] = 2.0**-101
        scales[21, 5:] = 1.63 * 2.0**99
    prepared, x = linear_bf16.prepare(replace(weight, scales=scales), torch.float32), inputs(80, 640)
    whole = linear_bf16.run(x, prepared).view(torch.int32)
    for first, count in ((0, 1), (5, 16), (8, 32)):
        assert torch.equal(
            linear_bf16.run(x[first : first + count], prepared).view(torch.int32), whole[first : first + count]
        )


@needs_tiles
def test_no_rows_any_strides_and_rows_of_nan() -> None:
    prepared = linear_bf16.prepare(integer_weight(WeightOnly(4, 32), (40, 96)), torch.float32)
    assert linear_bf16.run(torch.empty(0, 96), prepared).shape == (0, 40)
    x = inputs(19, 96)
    clean = linear_bf16.run(x, prepared)
    assert torch.equal(linear_bf16.run(x.T.contiguous().T, prepared), clean)
    assert torch.equal(linear_bf16.run(torch.cat([x, x], 1)[:, :96], prepared), clean)
    x[3, 5] = float("nan")
    result = linear_bf16.run(x, prepared)
    assert result[3].isnan().all()
    assert torch.equal(result[:3], clean[:3]) and torch.equal(result[4:], clean[4:])


@needs_tiles
def test_parts_and_memory() -> None:
    """A weight put in parts is the whole one, and takes what a plan says."""
    for weight in (
        integer_weight(WeightOnly(4, 32), (96, 256), scale_dtype=torch.float16),
        DenseWeight(inputs(96, 100)),
        DenseWeight(inputs(96, 100).half()),
        weight_of(Fp8((-1, -1)), torch.float32, (96, 64)),
        integer_weight(WeightOnly(2, 32), (96, 256)),
    ):
        rows, columns = weight.shape
        problem = LinearProblem(scheme=weight.scheme, in_features=columns, out_features=rows, dtype=torch.float32)
        whole = linear_bf16.prepare(weight, torch.float32)
        x = inputs(5, columns)
        if isinstance(weight, DenseWeight):
            assembly = linear_bf16.Bf16Assembly(problem)
            assembly.put(50, DenseWeight(weight.weight[50:]))
            assembly.put(0, DenseWeight(weight.weight[:50]))
            assert torch.equal(linear_bf16.run(x, assembly.finish()), linear_bf16.run(x, whole))
        kept = [whole.steps, whole.panels.scales] + ([] if whole.panels.zeros is None else [whole.panels.zeros])
        stored = weight.nbytes
        assert linear_bf16.num_bytes(problem, stored) == sum(each.numel() * each.itemsize for each in kept)


@needs_tiles
@pytest.mark.parametrize(
    "scheme",
    [Dense(), WeightOnly(4, 32, False), WeightOnly(4, 32, act_order=True), Offset(4, 16), Fp8((1, -1))],
    ids=str,
)
def test_experts_give_what_an_expert_alone_gives(scheme: Scheme) -> None:
    problem = ExpertLinearProblem(
        scheme=scheme, num_experts=5, top_k=3, in_features=320, out_features=72, dtype=torch.float32
    )
    candidate = KernelSet(CpuPlatform().spec, cpu_activations="bf16").select_candidate("expert_linear", problem)
    assert candidate.name == "c_bf16" and candidate.prepare is not None and candidate.own_threads
    weights, ids = random_weights(scheme, 5, (72, 320)), random_ids(61, 5, 3)
    x = inputs(61, 320)
    ids[7, 1] = -1
    result = candidate.run(x, candidate.prepare(weights, torch.float32), ids)
    alone = [linear_bf16.run(x, linear_bf16.prepare(weight, torch.float32)) for weight in weights]
    for token in range(61):
        for choice, expert in enumerate(ids[token].tolist()):
            wanted = alone[expert][token] if expert >= 0 else torch.zeros(72)
            assert torch.equal(result[token, choice], wanted)


def problem_of(scheme: Scheme) -> LinearProblem:
    return LinearProblem(scheme=scheme, in_features=96, out_features=40, dtype=torch.float32)


@needs_tiles
def test_only_where_it_is_asked_for() -> None:
    w8a8 = Int8((1, -1), Activation(Element.INT8))
    schemes = (WeightOnly(4, 32), Dense(), Fp8((-1, -1)), w8a8)
    for mode, names in (
        ("exact", ["c_low_bit_float32", "c_dense_float32", "c_small_floats", "c_int8_activations"]),
        ("bf16", ["c_bf16", "c_bf16", "c_bf16", "c_int8_activations"]),
    ):
        kernels = KernelSet(CpuPlatform().spec, cpu_activations=mode)
        assert [kernels.select_candidate("linear", problem_of(scheme)).name for scheme in schemes] == names


@pytest.mark.parametrize(
    ("scheme", "reason"),
    [
        (WeightOnly(4, 24), "groups of 24 do not end on a multiple of 16 features"),
        (Int8((1, -1), Activation(Element.INT8)), "the checkpoint says how inputs are rounded"),
        (Fp8((1, -1), Activation(Element.FP8)), "the checkpoint says how inputs are rounded"),
    ],
    ids=str,
)
def test_reasons(scheme: Scheme, reason: str) -> None:
    assert reason in (linear_bf16.why_not(CpuPlatform().spec, problem_of(scheme)) or "")


def test_without_tiles_the_option_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from gpu_specs import gpu_spec

    monkeypatch.setattr(linear_bf16, "missing", lambda: "the processor has no tiles")
    with pytest.raises(
        ConfigError, match="cpu_activations is 'bf16', but the processor has no tiles; choose exact or int8"
    ):
        KernelSet(CpuPlatform().spec, cpu_activations="bf16")
    with pytest.raises(ConfigError, match="cpu_activations is 'bf16', but the model runs on gfx942; leave it out"):
        KernelSet(gpu_spec("gfx942"), cpu_activations="bf16")
