"""Schemes that quantize activations, or keep weights in 8 or 4 bits: which kernel, how honestly named, how right."""

from __future__ import annotations

import pytest
import torch
from gpu_specs import gpu_spec
from twofold.errors import UnsupportedError
from twofold.kernels.kernel_set import KernelSet
from twofold.kernels.problems import LinearProblem
from twofold.kernels.reference import fake_quantize
from twofold.platforms.cpu import CpuPlatform
from twofold.quant.canonical import CanonicalWeight, EightBitWeight, MicroScaledWeight, PackedWeight, dequantize, pack
from twofold.quant.scheme import Activation, Element, Fp8, Int8, LowBit, MicroScaled, Offset, activation_of

TOKEN8, TENSOR8 = Activation(Element.INT8), Activation(Element.INT8, 0, dynamic=False)
FP8_TOKEN = Activation(Element.FP8)
NV = Activation(Element.FP4, 16, dynamic=False)
ROWS, COLUMNS = 24, 80


def weight_of(scheme: object, static: torch.Tensor | None = None) -> CanonicalWeight:
    """A random weight [ROWS, COLUMNS] of a scheme."""
    random = torch.Generator().manual_seed(5)
    if isinstance(scheme, Int8 | Fp8):
        scales = torch.rand(scheme.num_blocks((ROWS, COLUMNS)), generator=random) + 0.5
        values = torch.randint(-128, 128, (ROWS, COLUMNS), generator=random)
        codes = values.to(torch.int8) if isinstance(scheme, Int8) else values.float().to(torch.float8_e4m3fn)
        asymmetric = isinstance(scheme, Int8) and not scheme.symmetric
        zeros = torch.randint(-9, 9, scales.shape, generator=random).to(torch.int8) if asymmetric else None
        return EightBitWeight(scheme, codes, scales, zeros, static)
    if isinstance(scheme, MicroScaled):
        packed = torch.randint(0, 256, (ROWS, COLUMNS // 2), generator=random, dtype=torch.uint8)
        scales = torch.rand(ROWS, -(-COLUMNS // 16), generator=random).to(torch.float8_e4m3fn)
        return MicroScaledWeight(scheme, (ROWS, COLUMNS), packed, scales, torch.tensor([[3.0]]), static)
    assert isinstance(scheme, LowBit | Offset)
    codes = torch.randint(0, 2**scheme.bits, (ROWS, COLUMNS), generator=random)
    scales = torch.rand(ROWS, scheme.num_groups(COLUMNS), generator=random)
    zeros = None if scheme.symmetric else torch.full_like(scales, 7.3)
    return PackedWeight(scheme, (ROWS, COLUMNS), pack(codes, scheme.bits), scales, zeros, None, static)


# One scale for all rows: each depends on the others, so torch rounds them.
FP8_WHOLE, INT8_WHOLE = (Activation(element, 0) for element in (Element.FP8, Element.INT8))
CASES = [
    (Int8((1, -1), TOKEN8), None, "c_int8_activations"),
    (Int8((1, 16), TENSOR8, symmetric=False), 0.02, "c_int8_activations"),
    (Int8((-1, -1), TENSOR8), 0.02, "c_int8_activations"),
    (Int8((1, 8), TOKEN8), None, "c_low_bit_rounded"),
    (Int8((1, 10), TOKEN8), None, "c_dense_emulated"),
    (Int8((1, -1), INT8_WHOLE), None, "c_low_bit_emulated"),
    (Fp8((1, -1), FP8_TOKEN), None, "c_small_floats"),
    (Fp8((16, 32), Activation(Element.FP8, 32)), None, "c_small_floats"),
    (Fp8((-1, -1)), None, "c_small_floats"),
    (Fp8((1, -1), FP8_WHOLE), None, "c_dense_emulated"),
    (LowBit(4, 16, activation=FP8_TOKEN), None, "c_low_bit_rounded"),
    (Offset(2, 16), None, "c_dense_dequantized"),
    (MicroScaled(Element.FP4, 16, False, NV), 100.0, "c_small_floats"),
]
NATIVE = ("c_int8_activations", "c_low_bit_rounded", "c_small_floats")


@pytest.mark.parametrize(("scheme", "static", "name"), CASES, ids=lambda case: str(case))
@pytest.mark.parametrize("compiled", [True, False])
def test_product_of_rounded_input_and_expanded_weight(
    scheme: object, static: float | None, name: str, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiled:
        for module in ("quantized_linear", "cpu.library"):
            monkeypatch.setattr(f"twofold.kernels.{module}.unavailable", lambda: "no compiler")
    kernels = KernelSet(CpuPlatform().spec)
    candidate = kernels.select_candidate(
        "linear", LinearProblem(scheme=scheme, in_features=COLUMNS, out_features=ROWS, dtype=torch.float32)
    )
    emulates = activation_of(scheme) is not None  # type: ignore[arg-type]
    assert candidate.name == (name if compiled else ("torch_emulated" if emulates else "torch_dequantized"))
    native = compiled and name in NATIVE
    assert candidate.quality.value == ("native" if native else "emulated" if emulates else "dequantizing")
    weight = weight_of(scheme, None if static is None else torch.tensor(static))
    x, bias = torch.randn(3, COLUMNS), torch.randn(ROWS)
    assert candidate.prepare is not None
    actual = candidate.run(x, candidate.prepare(weight, torch.float32), bias)
    how = activation_of(scheme)  # type: ignore[arg-type]
    rounded = x if how is None else fake_quantize(x, how, weight.input_scale)  # type: ignore[union-attr]
    expected = rounded.double() @ dequantize(weight).double().T + bias
    scale = (rounded.double().abs() @ dequantize(weight).double().abs().T).max().item()
    assert (actual - expected).abs().max().item() < 1e-6 * scale


def test_activation_quantization_is_never_left_out_in_silence() -> None:
    problem = LinearProblem(scheme=Fp8((1, -1), FP8_WHOLE), in_features=64, out_features=64, dtype=torch.float32)
    kernels = KernelSet(CpuPlatform().spec)
    kernels.select("linear", problem)
    (row,) = kernels.report()
    assert row["quality"] == "emulated" and "c_low_bit_emulated: the weight is fp8 channel" in row["refused"]
    with pytest.raises(UnsupportedError, match=r"strict.*emulated"):
        KernelSet(CpuPlatform().spec, strict=True).check("linear", problem)
    assert KernelSet(CpuPlatform().spec).report() == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gpus_without_a_kernel_keep_the_weight_small(dtype: torch.dtype) -> None:
    scheme = Fp8((1, 8), FP8_TOKEN)
    problem = LinearProblem(scheme=scheme, in_features=COLUMNS, out_features=ROWS, dtype=dtype)
    candidate = KernelSet(gpu_spec("gfx942")).select_candidate("linear", problem)
    assert candidate.name == "torch_unpacking_emulated" and candidate.prepare is not None
    weight = weight_of(scheme)
    assert isinstance(weight, EightBitWeight)
    prepared = candidate.prepare(weight, dtype)
    assert prepared.weight is weight
    x = torch.randn(3, COLUMNS, dtype=dtype)
    expected = fake_quantize(x, FP8_TOKEN).double() @ dequantize(weight).double().T
    assert (candidate.run(x, prepared).double() - expected).norm() < 0.01 * expected.norm()
