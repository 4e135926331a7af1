"""torch's products of 8-bit codes, run on the CPU, against float64; and where they are refused."""

from __future__ import annotations

import pytest
import torch
from eight_bit_cases import EIGHT_BIT_SCHEMES, eight_bit_weight
from gpu_specs import gpu_spec
from twofold.kernels import reference
from twofold.kernels.kernel_set import KernelSet
from twofold.kernels.problems import LinearProblem
from twofold.kernels.torch_scaled import fits_scaled_mm, run_int_mm, run_scaled_mm, why_no_int_mm, why_no_scaled_mm
from twofold.kernels.triton.scaled_weight import prepare_native
from twofold.quant.canonical import dequantize
from twofold.quant.scheme import Activation, Element, Fp8, Int8

TOKEN8, TOKEN_FP8 = Activation(Element.INT8), Activation(Element.FP8)
STATIC_FP8 = Activation(Element.FP8, 0, dynamic=False)


def problem(scheme: Int8 | Fp8, outputs: int = 64, features: int = 96, **changes: object) -> LinearProblem:
    given = {"dtype": torch.bfloat16, **changes}
    return LinearProblem(scheme=scheme, out_features=outputs, in_features=features, **given)  # type: ignore[arg-type]


RUNNING = [
    (scheme, run)
    for scheme in EIGHT_BIT_SCHEMES
    for why, run in ((why_no_scaled_mm, run_scaled_mm), (why_no_int_mm, run_int_mm))
    if why(gpu_spec("sm_90"), problem(scheme)) is None
]


def test_both_products_have_cases() -> None:
    assert [run for _, run in RUNNING].count(run_int_mm) >= 5 and [run for _, run in RUNNING].count(run_scaled_mm) >= 2


@pytest.mark.parametrize(("scheme", "run"), RUNNING, ids=str)
@pytest.mark.parametrize("rows", [0, 1, 17, 40])
def test_products(scheme: Int8 | Fp8, run: object, rows: int) -> None:
    weight, x = eight_bit_weight(scheme, 64, 96), torch.randn(rows, 96).bfloat16()
    bias, prepared = torch.randn(64).bfloat16(), prepare_native(weight, torch.bfloat16)
    actual = run(x, prepared, bias)  # type: ignore[operator]
    assert actual.shape == (rows, 64) and actual.dtype is torch.bfloat16
    quantized = reference.quantize_activation(x, scheme.activation, weight.input_scale, weight.input_zero)  # type: ignore[arg-type]
    expected = quantized.dequantize(torch.float64) @ dequantize(weight, torch.float64).T + bias.double()
    torch.testing.assert_close(actual.double(), expected, rtol=2.0**-7, atol=2.0**-5)
    assert torch.equal(run(quantized, prepared, bias), actual)  # type: ignore[operator]


def test_refusals_say_why() -> None:
    hopper, ada = gpu_spec("sm_90"), gpu_spec("sm_89")
    per_token, static = Fp8((1, -1), TOKEN_FP8), Fp8((-1, -1), STATIC_FP8)
    assert why_no_scaled_mm(hopper, problem(per_token)) is None and why_no_scaled_mm(ada, problem(static)) is None
    assert "not on sm_89" in str(why_no_scaled_mm(ada, problem(per_token)))
    assert "sm_80 has no fp8" in str(why_no_scaled_mm(gpu_spec("sm_80"), problem(static)))
    assert "100 x 96 are not both multiples of 16" in str(why_no_scaled_mm(hopper, problem(static, 100)))
    assert "bfloat16, not float16" in str(why_no_scaled_mm(hopper, problem(per_token, dtype=torch.float16)))
    blocks = Fp8((32, 32), Activation(Element.FP8, 32))
    assert "change along the input" in str(why_no_scaled_mm(hopper, problem(blocks)))
    assert "zero points" in str(why_no_int_mm(hopper, problem(Int8((1, -1), TOKEN8, symmetric=False))))
    assert "no int8" in str(why_no_int_mm(gpu_spec("sm_70"), problem(Int8((1, -1), TOKEN8))))


def test_they_serve_gpus_without_triton_or_bfloat16() -> None:
    bare = KernelSet(gpu_spec("sm_90", has_triton=False))
    assert bare.select_candidate("linear", problem(Fp8((1, -1), TOKEN_FP8))).name == "torch_scaled_mm"
    old = KernelSet(gpu_spec("sm_75"))
    chosen = old.select_candidate("linear", problem(Int8((1, -1), TOKEN8), dtype=torch.float16))
    assert chosen.name == "torch_int_mm" and chosen.quality.value == "native"


def test_which_prepared_weights_the_vendor_may_take() -> None:
    for scheme, outputs, dtype, fits in (
        (Fp8((1, -1), TOKEN_FP8), 64, torch.bfloat16, True),
        (Fp8((1, -1), TOKEN_FP8), 72, torch.bfloat16, False),
        (Fp8((1, -1), TOKEN_FP8), 64, torch.float16, False),
        (Fp8((32, 32), Activation(Element.FP8, 32)), 64, torch.bfloat16, False),
        (Int8((1, -1), TOKEN8), 64, torch.bfloat16, False),
    ):
        assert fits_scaled_mm(prepare_native(eight_bit_weight(scheme, outputs, 96), dtype), dtype) is fits
