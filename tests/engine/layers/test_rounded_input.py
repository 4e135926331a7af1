"""Norms and gated layers that hand inputs rounded to bfloat16 to the product behind them: the same bits as without."""

from __future__ import annotations

import pytest
import torch
from int8_cases import integer_weight
from torch import Tensor
from twofold.engine.layers.linear import Linear, prepare_part
from twofold.engine.layers.mlp import GatedMLP, gated_activation
from twofold.engine.layers.norm import QuantizingNorm, RMSNorm
from twofold.kernels.cpu import linear_bf16
from twofold.kernels.cpu.bf16_rows import FEW_ROWS
from twofold.kernels.kernel_set import KernelSet
from twofold.platforms.cpu import CpuPlatform
from twofold.quant.scheme import WeightOnly

pytestmark = pytest.mark.skipif(linear_bf16.missing() is not None, reason=f"no tiles: {linear_bf16.missing()}")
ROWS = 70


@pytest.fixture
def kernels() -> KernelSet:
    return KernelSet(CpuPlatform().spec, cpu_activations="bf16")


def linear(kernels: KernelSet, rows: int, columns: int, *, act_order: bool = False) -> Linear:
    weight = integer_weight(WeightOnly(4, 32, act_order=act_order), (rows, columns))
    return Linear([prepare_part(weight, None, torch.float32, kernels)])


def inputs(columns: int) -> Tensor:
    return torch.randn(ROWS, columns, generator=torch.Generator().manual_seed(columns))


@pytest.mark.parametrize("size", [96, 100])
def test_norms_round_many_rows(kernels: KernelSet, size: int) -> None:
    plain = RMSNorm(torch.rand(size) + 0.5, 1e-5, kernels, 0.25)
    norm = plain.feeding(torch.bfloat16)
    assert isinstance(norm, QuantizingNorm) and plain.feeding(None) is plain
    x, residual = inputs(size), inputs(size + 1)[:, :size]
    for count in (1, FEW_ROWS, FEW_ROWS + 1, ROWS):
        result, (added, total) = norm(x[:count]), norm.add(x[:count], residual[:count].clone())
        wanted, (added_plain, total_plain) = plain(x[:count]), plain.add(x[:count], residual[:count].clone())
        dtype = torch.bfloat16 if count > FEW_ROWS else torch.float32
        assert isinstance(result, Tensor) and isinstance(added, Tensor) and result.dtype is dtype is added.dtype
        assert torch.equal(result, wanted.to(dtype)) and torch.equal(added, added_plain.to(dtype))
        assert torch.equal(total, total_plain)
        if count > FEW_ROWS:
            whole = result.as_strided((count, -(-size // 32) * 32), result.stride())
            assert not whole[:, size:].any(), "what a product reads beyond K is not 0"


def test_a_gated_layer_in_one_go(kernels: KernelSet) -> None:
    gate_up, down = linear(kernels, 192, 128), linear(kernels, 128, 96)
    gated = gate_up.gated("silu", down.input_format)
    assert gated is not None and gate_up.gated("silu", None) is None
    activation = gated_activation("silu", torch.float32, kernels, down.input_format)
    norm = RMSNorm(torch.rand(128) + 0.5, 1e-5, kernels)
    x = inputs(128)
    fused = GatedMLP(gate_up, down, activation, gated)(norm.feeding(format_of(gate_up))(x))
    plain = GatedMLP(gate_up, down, activation)
    assert torch.equal(fused, plain(norm(x)))
    assert torch.equal(fused, torch.cat([plain(norm(row)) for row in x.split(1)]))


def format_of(layer: Linear) -> torch.dtype:
    assert layer.input_format is torch.bfloat16
    return torch.bfloat16


def test_what_wants_floats_gets_floats(kernels: KernelSet) -> None:
    ordered, exact = linear(kernels, 64, 96, act_order=True), KernelSet(CpuPlatform().spec)
    assert ordered.input_format is None and ordered.gated("silu", torch.bfloat16) is None
    assert linear(kernels, 192, 128).gated("silu", ordered.input_format) is None
    assert (
        linear(exact, 192, 128).gated("silu", torch.bfloat16) is None
        and linear(exact, 192, 128).gated("silu", None) is not None
    )
