"""Norms, rotary embedding, activations and cache writes against the torch definitions in float64."""

from __future__ import annotations

import pytest
import torch
from tolerance import assert_near
from torch import Tensor
from twofold.kernels import reference
from twofold.kernels.kv_layout import KVCache
from twofold.kernels.triton.activations import gelu_and_mul, silu_and_mul
from twofold.kernels.triton.rms_norm import MAX_TILE, add_rms_norm, rms_norm
from twofold.kernels.triton.rope import rope
from twofold.kernels.triton.write_kv import write_kv

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
pytestmark = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def randn(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 576), (17, 144), (2, 5000), (1, MAX_TILE + 77)])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm(dtype: torch.dtype, rows: int, columns: int, offset: float) -> None:
    x, weight = randn(rows, columns, dtype=dtype), randn(columns, dtype=dtype)
    expected = reference.rms_norm(x.double(), weight.double(), 1e-5, offset)
    assert_near(rms_norm(x, weight, 1e-5, offset), expected)


def test_rms_norm_of_the_heads_of_a_fused_projection(dtype: torch.dtype) -> None:
    fused = randn(5, 9 * 64 + 2 * 3 * 64, dtype=dtype)
    heads, weight = fused[:, 64 : 64 + 3 * 64].view(5, 3, 64), randn(64, dtype=dtype)
    assert_near(rms_norm(heads, weight, 1e-6), reference.rms_norm(heads.double(), weight.double(), 1e-6))


def test_rms_norm_of_nothing_and_of_a_transposed_row(dtype: torch.dtype) -> None:
    weight = randn(96, dtype=dtype)
    assert rms_norm(torch.empty(0, 96, dtype=dtype), weight, 1e-6).shape == (0, 96)
    x = randn(96, 4, dtype=dtype).T
    assert_near(rms_norm(x, weight, 1e-6), reference.rms_norm(x.double(), weight.double(), 1e-6))


@pytest.mark.parametrize(("rows", "columns"), [(1, 64), (5, 576), (1, MAX_TILE + 8)])
def test_add_rms_norm(dtype: torch.dtype, rows: int, columns: int) -> None:
    x, residual, weight = (
        randn(*shape, dtype=dtype, seed=n) for n, shape in enumerate([(rows, columns)] * 2 + [(columns,)])
    )
    normed, total = add_rms_norm(x, residual, weight, 1e-5, 1.0)
    assert torch.equal(total, x + residual)
    assert_near(normed, reference.rms_norm(total.double(), weight.double(), 1e-5, 1.0))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_size", "rotary"), [(9, 3, 64, 64), (1, 1, 96, 24), (32, 8, 128, 128), (3, 1, 80, 80)]
)
def test_rope(dtype: torch.dtype, interleaved: bool, heads: int, kv_heads: int, head_size: int, rotary: int) -> None:
    tokens = 5
    fused = randn(tokens, (heads + kv_heads) * head_size, dtype=dtype)
    q = fused[:, : heads * head_size].view(tokens, heads, head_size)
    k = fused[:, heads * head_size :].view(tokens, kv_heads, head_size)
    angles = torch.randn(40, rotary // 2, generator=torch.Generator().manual_seed(3)) * 9
    cos_sin = torch.cat([angles.cos(), angles.sin()], -1)
    positions = torch.tensor([0, 39, 7, 7, 21])
    expected = reference.rope(q.double(), k.double(), cos_sin, positions, interleaved)
    untouched = q[..., rotary:].clone()
    actual = rope(q, k, cos_sin, positions, interleaved)
    for got, want in zip(actual, expected, strict=True):
        assert_near(got, want, factor=1.0)
    assert torch.equal(actual[0][..., rotary:], untouched)


@pytest.mark.parametrize(("tokens", "columns"), [(1, 1), (3, 1536), (2, 1000), (0, 8)])
def test_activations(dtype: torch.dtype, tokens: int, columns: int) -> None:
    x = 3 * randn(tokens, 2 * columns, dtype=dtype)
    assert_near(silu_and_mul(x), reference.silu_and_mul(x.double()))
    for approximate in ("none", "tanh"):
        assert_near(gelu_and_mul(x, approximate), reference.gelu_and_mul(x.double(), approximate))


def test_activations_of_extreme_gates_are_finite(dtype: torch.dtype) -> None:
    x = torch.tensor([[-200.0, 200.0, 0.0, -0.0, 1.0, 1.0, 1.0, 1.0]]).to(dtype)
    assert_near(silu_and_mul(x), reference.silu_and_mul(x.double()))
    assert_near(gelu_and_mul(x, "tanh"), reference.gelu_and_mul(x.double(), "tanh"))


@pytest.mark.parametrize(
    ("kv_heads", "head_size", "block_size"), [(3, 64, 16), (1, 80, 16), (12, 128, 32), (2, 256, 7)]
)
@pytest.mark.parametrize("head_major", [False, True])
def test_write_kv(dtype: torch.dtype, kv_heads: int, head_size: int, block_size: int, head_major: bool) -> None:
    num_blocks, tokens = 5, 4
    caches = [torch.zeros(num_blocks, block_size, kv_heads, head_size, dtype=dtype) for _ in range(2)]
    if head_major:
        caches = [cache.transpose(1, 2).contiguous().transpose(1, 2) for cache in caches]
    key, value = (randn(tokens, kv_heads, head_size, dtype=dtype, seed=seed) for seed in (1, 2))
    slots = torch.tensor([3, num_blocks * block_size - 1, 0, block_size])
    expected = [cache.clone() for cache in caches]
    reference.write_kv(key, value, KVCache(*expected), slots)
    write_kv(key, value, KVCache(*caches), slots)
    assert all(torch.equal(got, want) for got, want in zip(caches, expected, strict=True))


def test_write_kv_skips_negative_slots_and_converts(dtype: torch.dtype) -> None:
    caches = [torch.zeros(2, 16, 2, 64, dtype=torch.float16) for _ in range(2)]
    key = randn(2, 2, 64, dtype=dtype)
    write_kv(key, key, KVCache(*caches), torch.tensor([-1, 17]))
    assert torch.equal(caches[0][1, 1], key[1].half())
    assert torch.count_nonzero(caches[1]) == torch.count_nonzero(key[1].half())
