"""8-bit products and quantized inputs as this GPU computes them, against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from eight_bit_cases import EIGHT_BIT_SCHEMES, eight_bit_weight
from twofold.kernels import reference
from twofold.kernels.kernel_set import KernelSet
from twofold.kernels.problems import LinearProblem, QuantizeProblem
from twofold.quant.canonical import EightBitWeight, dequantize
from twofold.quant.scheme import Fp8, Int8

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU"),
]
OUTPUTS, FEATURES = 1008, 1168


def on_gpu(weight: EightBitWeight) -> EightBitWeight:
    names = ("codes", "scales", "zeros", "input_scale", "input_zero")
    moved = {name: getattr(weight, name) for name in names if getattr(weight, name) is not None}
    return replace(weight, **{name: tensor.cuda() for name, tensor in moved.items()})


@pytest.mark.parametrize("scheme", EIGHT_BIT_SCHEMES, ids=str)
@pytest.mark.parametrize("rows", [1, 7, 64, 300])
def test_every_candidate_is_right(scheme: Int8 | Fp8, rows: int) -> None:
    from twofold.kernels.kernel_set import default_registry
    from twofold.platforms import select_platform

    spec = select_platform("auto").spec
    problem = LinearProblem(scheme=scheme, in_features=FEATURES, out_features=OUTPUTS, dtype=torch.bfloat16)
    weight = eight_bit_weight(scheme, OUTPUTS, FEATURES)
    x, bias = torch.randn(rows, FEATURES).bfloat16(), torch.randn(OUTPUTS).bfloat16()
    values = x.double()
    if scheme.activation is not None:
        quantized = reference.quantize_activation(x, scheme.activation, weight.input_scale, weight.input_zero)
        values = quantized.dequantize(torch.float64)
    dense = dequantize(weight, torch.float64)
    expected, size = values @ dense.T + bias.double(), (values.square() @ dense.square().T).sqrt()
    tried = [c for c in default_registry(spec).candidates("linear") if c.can_run(spec, problem) is None]
    assert tried
    for candidate in tried:
        assert candidate.prepare is not None
        actual = candidate.run(x.cuda(), candidate.prepare(on_gpu(weight), torch.bfloat16), bias.cuda())
        error = (actual.cpu().double() - expected).abs() / (size + expected.abs())
        # Ties of the activations' codes may round differently; that is a step of few of K terms.
        assert error.max().item() < 0.03 and error.median().item() < 0.004, candidate.name


@pytest.mark.parametrize("scheme", [scheme for scheme in EIGHT_BIT_SCHEMES if scheme.activation], ids=str)
@pytest.mark.parametrize("columns", [576, 8192, 28672])
def test_fused_quantization(scheme: Int8 | Fp8, columns: int) -> None:
    from twofold.platforms import select_platform

    kernels = KernelSet(select_platform("auto").spec)
    problem = LinearProblem(scheme=scheme, in_features=256, out_features=64, dtype=torch.bfloat16)
    candidate = kernels.select_candidate("linear", problem)
    if candidate.input_format is None or candidate.prepare is None:
        pytest.skip(f"{candidate.name} quantizes nothing")
    wanted = candidate.input_format(candidate.prepare(on_gpu(eight_bit_weight(scheme, 64, 256)), torch.bfloat16))
    assert wanted is not None
    asked = QuantizeProblem(activation=wanted.how, codes_dtype=wanted.codes_dtype, dtype=torch.bfloat16)
    x, residual, weight = (torch.randn(*shape).bfloat16().cuda() for shape in ((5, columns), (5, columns), (columns,)))
    fused = kernels.select_fused("add_rms_norm_quantized", asked)
    if fused is None:
        pytest.skip("no fused kernel for the scheme")
    actual, total = fused(x, residual, weight, 1e-5, wanted)
    expected, expected_total = reference.add_rms_norm_quantized(x, residual, weight, 1e-5, wanted)
    assert torch.equal(total, expected_total)
    torch.testing.assert_close(actual.scale, expected.scale, rtol=0.01, atol=0)
    differing = (actual.codes.float() - expected.codes.float()).abs() > 0
    assert differing.float().mean().item() < 0.05
    gated = torch.randn(5, 2 * columns).bfloat16().cuda()
    silu = kernels.select_fused("silu_and_mul_quantized", asked)
    assert silu is not None
    ours, theirs = silu(gated, wanted), reference.silu_and_mul_quantized(gated, wanted)
    torch.testing.assert_close(ours.dequantize().float(), theirs.dequantize().float(), rtol=0.13, atol=0.05)
