"""C norms, rotary embedding and activation against kernels/reference/ in float64."""

from __future__ import annotations

import pytest
import torch
from twofold.kernels import reference
from twofold.kernels.cpu import elementwise
from twofold.kernels.cpu.library import unavailable

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=f"no compiled kernels: {unavailable()}")


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def close(result: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(result.double(), expected, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("rows", [0, 1, 3, 200])
@pytest.mark.parametrize("size", [1, 5, 64, 577])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_norms(rows, size, offset):
    x, weight = randn(rows, size + 1)[:, 1:], randn(size)
    close(elementwise.rms_norm(x, weight, 1e-5, offset), reference.rms_norm(x.double(), weight, 1e-5, offset))
    residual = randn(rows, size)
    summed = x + residual
    normed, total = elementwise.add_rms_norm(x, residual, weight, 1e-5, offset)
    close(normed, reference.rms_norm(summed.double(), weight, 1e-5, offset))
    assert torch.equal(total, summed)


def test_norm_of_heads_in_a_fused_projection():
    fused, weight = randn(7, 12, 16), randn(16).to(torch.bfloat16)
    heads = fused[:, 4:9]
    close(elementwise.rms_norm(heads, weight, 1e-6), reference.rms_norm(heads.double(), weight.double(), 1e-6))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("head_size", "rotary"), [(64, 64), (80, 32), (6, 6)])
@pytest.mark.parametrize("tokens", [1, 40])
def test_rope(interleaved, head_size, rotary, tokens):
    fused = randn(tokens, 9, head_size)
    table, positions = randn(50, rotary), torch.randint(0, 50, (tokens,), generator=torch.Generator().manual_seed(0))
    expected = reference.rope(fused[:, :6].double(), fused[:, 6:].double(), table, positions, interleaved)
    for result, right in zip(
        elementwise.rope(fused[:, :6], fused[:, 6:], table, positions, interleaved), expected, strict=True
    ):
        close(result, right)


@pytest.mark.parametrize("size", [1, 16, 37, 1536])
@pytest.mark.parametrize("rows", [0, 1, 9])
def test_silu_and_mul(size, rows):
    x = randn(rows, 2 * size) * 10
    close(elementwise.silu_and_mul(x), reference.silu_and_mul(x.double()))


def test_silu_at_the_ends_of_the_range():
    gate = torch.tensor([[-1e30, -200.0, -88.0, 0.0, 88.0, 200.0, 1e30, float("inf")] * 2])
    x = torch.cat((gate, torch.ones_like(gate)), 1)
    torch.testing.assert_close(elementwise.silu_and_mul(x), reference.silu_and_mul(x), atol=1e-30, rtol=1e-6)
    assert elementwise.silu_and_mul(torch.full((1, 64), float("nan"))).isnan().all()


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("size", [1, 16, 37, 1536])
def test_gelu_and_mul(size, approximate):
    x = randn(9, 2 * size) * 6
    close(elementwise.gelu_and_mul(x, approximate), reference.gelu_and_mul(x.double(), approximate))


@pytest.mark.parametrize("limit", [3.0, 30.0])
def test_soft_cap(limit):
    x = torch.cat([randn(3, 5000) * 2 * limit, torch.tensor([[-1e30, 1e30, 0.0]]).repeat(3, 1)], dim=1)
    result = elementwise.soft_cap(x.clone(), limit).double()
    torch.testing.assert_close(result, limit * torch.tanh(x.double() / limit), atol=limit * 2e-7, rtol=1e-6)


@pytest.mark.parametrize("size", [1, 64, 577])
def test_sigmoid_gate(size):
    x, gates = randn(5, size), torch.tensor([[-100.0], [-1.0], [0.0], [2.5], [100.0]])
    close(elementwise.sigmoid_gate(x.clone(), gates), x.double() * torch.sigmoid(gates.double()))
