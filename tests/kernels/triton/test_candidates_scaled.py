"""Which 8-bit problems the Triton kernels take on which device, and the words in which they refuse."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from eight_bit_cases import EIGHT_BIT_SCHEMES, eight_bit_weight
from gpu_specs import gpu_spec
from twofold.kernels.kernel_set import KernelSet
from twofold.kernels.problems import LinearProblem, QuantizeProblem
from twofold.quant.scheme import Activation, Element, Fp8, Int8

ARCHS = ["sm_80", "sm_89", "sm_90", "sm_120", "gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201"]
WITHOUT_FP8 = ("sm_80", "gfx90a", "gfx1100")
TOKEN8, TOKEN_FP8 = Activation(Element.INT8), Activation(Element.FP8)


@functools.cache
def kernels_of(arch: str) -> KernelSet:
    return KernelSet(gpu_spec(arch))


def problem(scheme: Int8 | Fp8, outputs: int = 1000, features: int = 4096) -> LinearProblem:
    return LinearProblem(scheme=scheme, out_features=outputs, in_features=features, dtype=torch.bfloat16)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("scheme", EIGHT_BIT_SCHEMES, ids=str)
def test_every_scheme_has_a_kernel(scheme: Int8 | Fp8, arch: str) -> None:
    chosen = kernels_of(arch).select_candidate("linear", problem(scheme))
    if scheme.activation is None:
        assert (chosen.name, chosen.quality.value) == ("triton_fp8_weights", "native")
    elif isinstance(scheme, Fp8) and arch in WITHOUT_FP8:
        assert (chosen.name, chosen.quality.value) == ("triton_fp8_emulated", "emulated")
    else:
        assert (chosen.name, chosen.quality.value) == ("triton_8bit", "native")


@pytest.mark.parametrize("scheme", EIGHT_BIT_SCHEMES, ids=str)
@pytest.mark.parametrize("arch", ["sm_90", "gfx942", "sm_80"])
def test_the_bytes_of_a_prepared_weight_are_foretold(scheme: Int8 | Fp8, arch: str) -> None:
    weight = eight_bit_weight(scheme, 40, 208)
    case = problem(scheme, 40, 208)
    chosen = kernels_of(arch).select_candidate("linear", case)
    assert chosen.prepare is not None and chosen.prepared_bytes is not None and chosen.input_format is not None
    prepared = chosen.prepare(weight, torch.bfloat16)
    kept = [t for t in (prepared.codes, prepared.scales, prepared.zeros, prepared.sums) if t is not None]
    assert chosen.prepared_bytes(case, weight.nbytes) == sum(t.nbytes for t in kept)
    wanted = chosen.input_format(prepared)
    assert (wanted is None) == (scheme.activation is None)
    if wanted is not None and scheme.activation is not None and scheme.activation.element is Element.FP8:
        kinds = {"sm_90": torch.float8_e4m3fn, "gfx942": torch.float8_e4m3fnuz, "sm_80": torch.bfloat16}
        assert wanted.codes_dtype is kinds[arch]


def refusals(arch: str, case: LinearProblem) -> str:
    kernels = KernelSet(gpu_spec(arch))
    kernels.select("linear", case)
    return next(row["refused"] for row in kernels.report())


def test_refusals_say_why() -> None:
    assert "sm_80 has no fp8 matrix instructions" in refusals("sm_80", problem(Fp8((1, -1), TOKEN_FP8)))
    assert "8 features share their scales" in refusals("sm_90", problem(Fp8((1, 8), TOKEN_FP8)))
    mixed = Int8((1, -1), TOKEN_FP8)
    assert "int8 weights with int8 activations" in refusals("sm_90", problem(mixed))
    wide = problem(Int8((1, -1), replace(TOKEN8, symmetric=False)), features=2**16 + 16)
    assert "can overflow int32" in refusals("sm_90", wide)
    assert "sm_75 has no bfloat16 matrix" in refusals("sm_75", problem(Int8((1, -1), TOKEN8)))


def test_fused_quantization() -> None:
    kernels = KernelSet(gpu_spec("gfx942"))

    def select(how: Activation, kind: torch.dtype) -> object:
        asked = QuantizeProblem(activation=how, codes_dtype=kind, dtype=torch.bfloat16)
        return kernels.select_fused("rms_norm_quantized", asked)

    assert select(TOKEN8, torch.int8) is not None
    assert select(replace(TOKEN_FP8, group_size=128), torch.float8_e4m3fnuz) is not None
    assert select(TOKEN_FP8, torch.float8_e4m3fn) is None
    assert select(replace(TOKEN8, group_size=0), torch.int8) is None
    assert select(replace(TOKEN_FP8, group_size=48), torch.float8_e4m3fnuz) is None
