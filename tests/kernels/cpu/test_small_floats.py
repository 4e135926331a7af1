"""Weights in fp8 and fp4 that stay so: bit for bit what their dequantized matrix gives, for any number of rows."""

from __future__ import annotations

import pytest
import torch
from small_float_cases import SCHEMES, TOKEN, weight_of
from torch import Tensor
from twofold.kernels.cpu import linear, linear_rounded, small_floats
from twofold.kernels.cpu.library import unavailable
from twofold.kernels.cpu.tape import TapeRecorder
from twofold.kernels.problems import LinearProblem
from twofold.kernels.reference import fake_quantize
from twofold.platforms import cpu_threads
from twofold.quant.canonical import CanonicalWeight, DenseWeight, EightBitWeight, dequantize, merge
from twofold.quant.scheme import Fp8, MicroScaled

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=f"no compiled kernels: {unavailable()}")

SHAPES = [(32, 64), (70, 130), (1, 7), (100, 257), (33, 128)]
NO_NUMBERS = (0x7F, 0xFF)


def dense_product(x: Tensor, weight: CanonicalWeight, bias: Tensor | None = None) -> Tensor:
    return linear.run(x, linear.prepare_dense(DenseWeight(dequantize(weight)), torch.float32), bias)


@pytest.mark.parametrize(("scheme", "scales"), SCHEMES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_dequantized_matrix(scheme: Fp8 | MicroScaled, scales: torch.dtype, shape: tuple[int, int]) -> None:
    weight = weight_of(scheme, scales, shape)
    panels = small_floats.prepare(weight, torch.float32)
    for rows in (1, 2, 3, 4, 5, 6, 7, 8, 9, 30):
        x, bias = torch.randn(rows, shape[1]), torch.randn(shape[0])
        rounded = x if scheme.activation is None else fake_quantize(x, scheme.activation)
        product = linear_rounded.run(x, panels, bias)
        assert torch.equal(product, dense_product(rounded, weight, bias))
        scale = (rounded.double().abs() @ dequantize(weight).double().abs().T).max()
        wanted = rounded.double() @ dequantize(weight).double().T + bias
        assert (product - wanted).abs().max() < 1e-6 * scale + 1e-6


@pytest.mark.parametrize("threads", [1, 3])
def test_a_row_depends_on_nothing_but_itself(threads: int) -> None:
    weight = weight_of(*SCHEMES[2], (150, 320))
    panels = small_floats.prepare(weight, torch.float32)
    x = torch.randn(70, 320)
    cpu_threads.set_num_threads(threads)
    together = linear_rounded.run(x, panels)
    for rows in (1, 3, 8, 13):
        assert torch.equal(linear_rounded.run(x[20 : 20 + rows], panels), together[20 : 20 + rows])


@pytest.mark.parametrize("code", NO_NUMBERS)
@pytest.mark.parametrize("rows", [1, 20])
def test_a_code_that_is_no_number_stays_none(code: int, rows: int) -> None:
    weight = weight_of(Fp8((1, 32)), torch.float32, (40, 96))
    assert isinstance(weight, EightBitWeight)
    weight.codes.view(torch.uint8)[7, 41] = code
    product = linear_rounded.run(torch.randn(rows, 96), small_floats.prepare(weight, torch.float32))
    assert product[:, 7].isnan().all() and int(product.isnan().sum()) == rows


def test_parts_with_scales_of_different_types() -> None:
    scheme = Fp8((1, -1), TOKEN)
    parts = [weight_of(scheme, kind, (24, 68), seed) for seed, kind in enumerate((torch.bfloat16, torch.float32))]
    assembly = small_floats.SmallFloatAssembly(
        LinearProblem(scheme=scheme, in_features=68, out_features=48, dtype=torch.float32)
    )
    for index, part in enumerate(parts):
        assembly.put(24 * index, part)
    x = torch.randn(5, 68)
    wanted = torch.cat([dense_product(fake_quantize(x, TOKEN), part) for part in parts], dim=1)
    assert torch.equal(linear_rounded.run(x, assembly.finish()), wanted)
    alike = [weight_of(scheme, torch.float32, (24, 68), seed) for seed in (3, 4)]
    (merged,) = merge(alike)
    product = linear_rounded.run(x, small_floats.prepare(merged, torch.float32))
    assert torch.equal(product[:, 24:], dense_product(fake_quantize(x, TOKEN), alike[1]))


@pytest.mark.parametrize(("scheme", "scales"), SCHEMES, ids=str)
def test_memory_is_what_was_planned(scheme: Fp8 | MicroScaled, scales: torch.dtype) -> None:
    weight = weight_of(scheme, scales, (70, 256))
    prepared = small_floats.prepare(weight, torch.float32)
    panels = prepared.panels if isinstance(prepared, linear_rounded.RoundedPanels) else prepared
    problem = LinearProblem(scheme=scheme, in_features=256, out_features=70, dtype=torch.float32)
    assert small_floats.num_bytes(problem, weight.nbytes) == panels.codes.nbytes + panels.scales.nbytes


def test_a_recorded_step_rounds_and_multiplies_anew() -> None:
    weight = weight_of(*SCHEMES[1], (48, 64))
    panels, x = small_floats.prepare(weight, torch.float32), torch.zeros(3, 64)
    graph = TapeRecorder().record(lambda: (linear_rounded.run(x, panels),))
    x.copy_(torch.randn(3, 64))
    graph.replay()
    assert torch.equal(graph.outputs[0], linear_rounded.run(x, panels))
