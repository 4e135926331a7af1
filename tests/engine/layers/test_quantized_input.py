"""When a norm or an activation hands a quantized input to the product behind it."""

from __future__ import annotations

import torch
from eight_bit_cases import eight_bit_weight
from gpu_specs import gpu_spec
from twofold.engine.layers.linear import Linear, prepare_part
from twofold.engine.layers.mlp import gated_activation
from twofold.engine.layers.norm import QuantizingNorm, RMSNorm
from twofold.kernels.kernel_set import KernelSet
from twofold.kernels.quantized_input import InputFormat
from twofold.platforms.cpu import CpuPlatform
from twofold.quant.canonical import EightBitWeight
from twofold.quant.scheme import Activation, Element, Fp8

STATIC = Fp8((-1, -1), Activation(Element.FP8, 0, dynamic=False))


def weight(scale: float) -> EightBitWeight:
    made = eight_bit_weight(STATIC, 32, 64)
    return EightBitWeight(made.scheme, made.codes, made.scales, None, torch.tensor(scale))


def linear(kernels: KernelSet, *scales: float) -> Linear:
    return Linear([prepare_part(weight(scale), None, torch.bfloat16, kernels) for scale in scales])


def test_parts_that_round_their_input_alike_share_a_quantized_one() -> None:
    kernels = KernelSet(gpu_spec("sm_90"))
    wanted = linear(kernels, 0.5, 0.5).input_format
    assert wanted is not None and wanted.codes_dtype is torch.float8_e4m3fn
    assert wanted.scale is not None and wanted.scale.item() == 0.5
    assert linear(kernels, 0.5, 0.25).input_format is None
    assert Linear([]).input_format is None


def test_fnuz_chips_want_scales_twice_as_large() -> None:
    wanted = linear(KernelSet(gpu_spec("gfx942")), 0.5).input_format
    assert wanted is not None and wanted.codes_dtype is torch.float8_e4m3fnuz
    assert wanted.scale is not None and wanted.scale.item() == 1.0


def test_norms_and_activations_quantize_where_a_kernel_does_both() -> None:
    gpu, cpu = KernelSet(gpu_spec("sm_90")), KernelSet(CpuPlatform().spec)
    wanted = linear(gpu, 0.5).input_format
    weights = torch.ones(64, dtype=torch.bfloat16)
    assert isinstance(RMSNorm(weights, 1e-5, gpu).feeding(wanted), QuantizingNorm)
    for kernels, asked in ((gpu, None), (cpu, wanted)):
        norm = RMSNorm(weights, 1e-5, kernels)
        assert norm.feeding(asked) is norm
    chosen = {row["op"] for row in gpu.report()}
    assert {"rms_norm_quantized", "add_rms_norm_quantized"} <= chosen
    for name in ("silu", "gelu_pytorch_tanh"):
        gated_activation(name, torch.bfloat16, gpu, wanted)
    assert {"silu_and_mul_quantized", "gelu_and_mul_quantized"} <= {row["op"] for row in gpu.report()}
    odd = InputFormat(Activation(Element.FP8, 48), torch.float8_e4m3fn)
    plain = RMSNorm(weights, 1e-5, gpu)
    assert plain.feeding(odd) is plain


def test_products_on_the_cpu_take_tensors_only() -> None:
    kernels = KernelSet(CpuPlatform().spec)
    assert Linear([prepare_part(weight(0.5), None, torch.float32, kernels)]).input_format is None
