"""The C products with inputs in 8 bits, against the rounded input times the dequantized weight in float64."""

from __future__ import annotations

import pytest
import torch
from int8_cases import PER_32, eight_bit_weight, expected_product, integer_weight
from torch import Tensor
from twofold.errors import ConfigError
from twofold.kernels.cpu import linear, linear_int8
from twofold.kernels.cpu.library import unavailable
from twofold.kernels.kernel_set import KernelSet
from twofold.kernels.problems import LinearProblem
from twofold.kernels.reference import fake_quantize, quantize_activation, scaled_matmul
from twofold.platforms import cpu_threads
from twofold.platforms.cpu import CpuPlatform
from twofold.quant.canonical import CanonicalWeight, EightBitWeight, dequantize
from twofold.quant.scheme import Activation, Dense, Element, Int8, LowBit, Offset, WeightOnly

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=f"no compiled kernels: {unavailable()}")

ROWS = [1, 2, 5, 6, 7, 16, 33]
# (N, K) and the weight's groups: single ones, short last ones, panels and blocks that do not fill up.
SHAPES = [
    ((1, 1), -1),
    ((70, 96), 32),
    ((32, 1300), 16),
    ((33, 147), -1),
    ((40, 700), 128),
    ((65, 1024), 1024),
    ((9, 48), 48),
]
TOKEN, TENSOR = Activation(Element.INT8), Activation(Element.INT8, 0, dynamic=False)


def inputs(rows: int, columns: int, seed: int = 1) -> Tensor:
    """Rows of very different sizes, a few outliers among them, in the middle of a wider matrix."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns + 5, generator=generator) * torch.logspace(-3, 3, rows)[:, None]
    x[:, ::37] *= 20
    return x[:, 2 : 2 + columns]


def check(weight: CanonicalWeight, x: Tensor, bias: Tensor | None) -> None:
    result = linear_int8.run(x, linear_int8.prepare(weight, torch.float32), bias)
    expected, size = expected_product(x, weight, bias)
    assert ((result - expected).abs() <= 1e-6 * size).all()


@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8])
@pytest.mark.parametrize(("shape", "group_size"), SHAPES)
@pytest.mark.parametrize("kind", ["symmetric", "zeros", "offsets", "act-order"])
def test_every_kind_of_integers(bits: int, shape: tuple[int, int], group_size: int, kind: str) -> None:
    scheme = (
        Offset(bits, group_size)
        if kind == "offsets"
        else WeightOnly(bits, group_size, kind == "symmetric", kind == "act-order")
    )
    weight = integer_weight(scheme, shape)
    bias = torch.randn(shape[0], generator=torch.Generator().manual_seed(2))
    for rows in ROWS:
        check(weight, inputs(rows, shape[1]), bias if rows % 2 else None)


@pytest.mark.parametrize(
    "scheme",
    [
        Int8((1, -1), TOKEN),
        Int8((-1, -1), TENSOR),
        Int8((1, 64), TOKEN, symmetric=False),
        Int8((1, 256), Activation(Element.INT8, 128)),
        Int8((16, 128), TENSOR),
        LowBit(4, 128, activation=TOKEN),
        LowBit(4, -1, False, activation=TENSOR),
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", [(70, 512), (33, 1028)], ids=str)
def test_checkpoints_that_ask_for_it(scheme: Int8 | LowBit, shape: tuple[int, int]) -> None:
    static = torch.tensor(0.05) if not scheme.activation.dynamic else None
    weight = (
        eight_bit_weight(scheme, shape, static) if isinstance(scheme, Int8) else integer_weight(scheme, shape, static)
    )
    for rows in (1, 6, 40):
        x = inputs(rows, shape[1])
        check(weight, x, None)
        if isinstance(weight, EightBitWeight):
            exact = scaled_matmul(quantize_activation(x, scheme.activation, static), weight)
            result = linear_int8.run(x, linear_int8.prepare(weight, torch.float32))
            torch.testing.assert_close(result, exact, rtol=1e-5, atol=1e-6 * exact.abs().max().item())


def in_two_planes(x: Tensor) -> Tensor:
    """x in float64 as its codes say: rounded, and what that left over rounded again in groups that err most."""
    first = fake_quantize(x, PER_32)
    squares = torch.nn.functional.pad(x, (0, -x.shape[1] % 32)).unflatten(1, (-1, 32)).abs().amax(-1).double() ** 2
    chosen = (squares > 2 * squares.mean(1, keepdim=True)).repeat_interleave(32, dim=1)[:, : x.shape[1]]
    return first.double() + torch.where(chosen, fake_quantize(x - first, PER_32), 0.0).double()


@pytest.mark.parametrize("kind", ["symmetric", "zeros", "offsets", "act-order"])
@pytest.mark.parametrize(("bits", "group_size"), [(4, 32), (8, 64), (8, 16)])
def test_groups_that_err_most_are_rounded_twice(bits: int, group_size: int, kind: str) -> None:
    scheme = (
        Offset(bits, group_size)
        if kind == "offsets"
        else WeightOnly(bits, group_size, kind == "symmetric", kind == "act-order")
    )
    weight = integer_weight(scheme, (70, 320))
    bias, matrix = torch.randn(70, generator=torch.Generator().manual_seed(2)), dequantize(weight)
    order = torch.arange(320) if weight.perm is None else weight.perm.long()
    for rows in (1, 3, 6, 8, 13, 40):
        x = inputs(rows, 320)
        result = linear_int8.run(x, linear_int8.prepare_two_planes(weight, torch.float32), bias)
        expected = in_two_planes(x[:, order]) @ matrix[:, order].double().T + bias
        size = x.double().abs() @ matrix.double().abs().T + bias.abs() + x.double().abs().sum(1, keepdim=True) * 2**bits
        # Now and then a tie of the second rounding falls the other way; without it the error is a hundred times this.
        assert ((result - expected).abs() <= 3e-5 * size).all()


def test_one_outgrown_feature_costs_little_in_two_planes() -> None:
    """What a large feature of each token costs the others of its group is nearly gone."""
    weight = integer_weight(WeightOnly(8, 32), (96, 576))
    x = torch.randn(40, 576, generator=torch.Generator().manual_seed(3))
    x[:, 200] *= 50
    exact = x.double() @ dequantize(weight).double().T
    one, two = (
        (linear_int8.run(x, prepare(weight, torch.float32)) - exact).pow(2).mean()
        for prepare in (linear_int8.prepare, linear_int8.prepare_two_planes)
    )
    assert two < 0.1 * one


def test_the_error_of_8_bits_is_bounded() -> None:
    """Each feature is off by at most half a step, and a step is the largest of its 32 over 127.5."""
    weight = integer_weight(WeightOnly(4, 64, False), (48, 320))
    x = inputs(20, 320)
    exact = x.double() @ dequantize(weight).double().T
    half_step = x.unflatten(1, (-1, 32)).abs().amax(-1).repeat_interleave(32, dim=1).double() / 255
    bound = half_step @ dequantize(weight).double().abs().T
    error = (linear_int8.run(x, linear_int8.prepare(weight, torch.float32)) - exact).abs()
    assert (error <= bound * 1.0001).all() and error.max() > 0.01 * bound.max()


@pytest.mark.parametrize(
    ("scheme", "columns"),
    [
        (WeightOnly(4, 32), 1408),
        (WeightOnly(8, -1, False), 1400),
        (Offset(4, 32), 640),
        (WeightOnly(8, 16), 320),
        (Int8((1, -1), TOKEN), 1500),
        (Int8((1, 128), TENSOR), 640),
        (Int8((1, 64), TOKEN, symmetric=False), 704),
        (Int8((1, 96), TOKEN), 960),
    ],
    ids=str,
)
def test_a_row_does_not_depend_on_its_batch_or_on_the_thread_count(scheme: WeightOnly | Int8, columns: int) -> None:
    shape = (200, columns)
    static = torch.tensor(0.05)
    weight = eight_bit_weight(scheme, shape, static) if isinstance(scheme, Int8) else integer_weight(scheme, shape)
    x = inputs(300, columns)
    threads = cpu_threads.num_threads()
    ways = [linear_int8.prepare] + [linear_int8.prepare_two_planes] * (not isinstance(scheme, Int8))
    try:
        for prepare in ways:
            prepared = prepare(weight, torch.float32)
            whole = linear_int8.run(x, prepared)
            for count in (1, 3):
                cpu_threads.set_num_threads(count)
                for rows in (1, 2, 6, 7, 13, 17, 35):
                    assert torch.equal(linear_int8.run(x[120 : 120 + rows], prepared), whole[120 : 120 + rows])
    finally:
        cpu_threads.set_num_threads(threads)


@pytest.mark.parametrize("outputs", [256, 289, 800, 2100])
@pytest.mark.parametrize("columns", [64, 512, 2048])
def test_few_rows_get_every_panel_however_many_share_them(outputs: int, columns: int) -> None:
    weight = integer_weight(WeightOnly(8, 32), (outputs, columns))
    threads = cpu_threads.num_threads()
    try:
        for count in (1, 2, 5, 40):
            cpu_threads.set_num_threads(count)
            for rows in (1, 3):
                check(weight, inputs(rows, columns), None)
    finally:
        cpu_threads.set_num_threads(threads)


@pytest.mark.parametrize("rows", [5, 600])
@pytest.mark.parametrize("group_size", [32, 64, -1])
def test_codes_are_those_of_a_division(rows: int, group_size: int) -> None:
    """Times one, a product is the rounded input itself; tenths make many ties."""
    how = Activation(Element.INT8, group_size)
    weight = EightBitWeight(Int8((1, -1), how), torch.eye(160).to(torch.int8), torch.ones(160, 1), None, None)
    generator = torch.Generator().manual_seed(rows)
    tenths = torch.randint(-1275, 1276, (rows, 160), generator=generator) / 10
    tenths[::2, ::32] = 127.5
    for x in (tenths, inputs(rows, 160), inputs(rows, 160) * 1e-34):
        result = linear_int8.run(x, linear_int8.prepare(weight, torch.float32))
        assert torch.equal(result, fake_quantize(x, how))


@pytest.mark.parametrize("rows", [3, 40])
def test_what_has_no_code_spoils_its_own_row_only(rows: int) -> None:
    prepared = linear_int8.prepare(integer_weight(WeightOnly(4, 32), (40, 96)), torch.float32)
    x = inputs(rows, 96)
    clean = linear_int8.run(x, prepared)
    x[0, 50], x[2, 3] = float("nan"), float("inf")
    result = linear_int8.run(x, prepared)
    assert result[0].isnan().all() and result[2].isnan().all()
    assert torch.equal(result[1], clean[1]) and torch.equal(result[3:], clean[3:])


def test_zeros_no_rows_and_any_strides() -> None:
    prepared = linear_int8.prepare(integer_weight(WeightOnly(4, 32), (40, 96)), torch.float32)
    assert linear_int8.run(torch.empty(0, 96), prepared).shape == (0, 40)
    assert not linear_int8.run(torch.zeros(9, 96), prepared).any()
    x = inputs(9, 96)
    transposed = x.T.contiguous().T
    assert torch.equal(linear_int8.run(transposed, prepared), linear_int8.run(x, prepared))


def test_only_where_it_is_asked_for() -> None:
    spec = CpuPlatform().spec
    packed, int8, dense = WeightOnly(4, 32), Int8((1, -1), TOKEN), Dense()

    def names(**options: str) -> list[str]:
        kernels = KernelSet(spec, **options)  # type: ignore[arg-type]
        return [
            kernels.select_candidate(
                "linear", LinearProblem(scheme=scheme, in_features=96, out_features=40, dtype=torch.float32)
            ).name
            for scheme in (packed, int8, dense)
        ]

    assert names() == ["c_low_bit_float32", "c_int8_activations", "c_dense_float32"]
    assert names(cpu_activations="int8") == ["c_int8_activations", "c_int8_activations", "c_dense_float32"]
    kernels = KernelSet(spec)
    kernels.select("linear", LinearProblem(scheme=packed, in_features=96, out_features=40, dtype=torch.float32))
    assert "c_int8_activations: activations in 8 bits were not asked for" in kernels.report()[0]["refused"]


def test_inputs_of_sensitive_layers_get_a_second_plane_where_inputs_are_rounded() -> None:
    def name(scheme: object, **options: str) -> str:
        kernels = KernelSet(CpuPlatform().spec, **options)  # type: ignore[arg-type]
        problem = LinearProblem(scheme=scheme, in_features=96, out_features=40, dtype=torch.float32, is_sensitive=True)
        return kernels.select_candidate("linear", problem).name

    assert name(WeightOnly(4, 32)) == "c_low_bit_float32"
    assert name(WeightOnly(4, 32), cpu_activations="int8") == "c_int16_activations"
    # Which rounding a checkpoint asks for is part of the model.
    assert name(Int8((1, -1), TOKEN), cpu_activations="int8") == "c_int8_activations"


def test_other_devices_refuse_the_option() -> None:
    from gpu_specs import gpu_spec

    with pytest.raises(ConfigError, match="cpu_activations is 'int8', but the model runs on gfx942"):
        KernelSet(gpu_spec("gfx942"), cpu_activations="int8")


@pytest.mark.parametrize(
    ("scheme", "reason"),
    [
        (Dense(), "not made of integers"),
        (Int8((1, 10), TOKEN), "scales change every 10 features"),
        (Int8((1, -1), Activation(Element.INT8, symmetric=False)), "rounds inputs to int8 around 0"),
        (Int8((1, -1), Activation(Element.INT8, 0)), "rounds inputs to int8 around 0"),
        (LowBit(4, 16, activation=Activation(Element.FP8)), "rounds inputs to int8 around 0"),
    ],
    ids=str,
)
def test_reasons(scheme: object, reason: str) -> None:
    problem = LinearProblem(scheme=scheme, in_features=80, out_features=24, dtype=torch.float32)
    assert reason in (linear_int8.why_not(CpuPlatform().spec, problem) or "")
    long = LinearProblem(scheme=Int8((1, -1), TOKEN), in_features=1 << 17, out_features=24, dtype=torch.float32)
    assert "may pass 32 bits" in (linear_int8.why_not(CpuPlatform().spec, long) or "")


def test_panels_are_those_of_the_exact_kernel() -> None:
    weight = integer_weight(WeightOnly(4, 32), (40, 96))
    ours, exact = linear_int8.prepare(weight, torch.float32).panels, linear.prepare_low_bit(weight, torch.float32)
    assert torch.equal(ours.codes, exact.codes) and torch.equal(ours.scales, exact.scales)
