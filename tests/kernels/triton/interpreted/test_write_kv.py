"""Writes into every type of cache, alone and behind rotary embedding and norms, against the torch definitions."""

from __future__ import annotations

import pytest
import torch
from tolerance import ROUNDOFF, assert_near
from torch import Tensor
from twofold.kernels import reference
from twofold.kernels.kv_layout import KVCache, allocate_kv_cache
from twofold.kernels.reference.kv_cache import dequantize_kv
from twofold.kernels.triton.rope_write_kv import rope_write_kv
from twofold.kernels.triton.write_kv import write_kv

SCALED = [torch.int8, torch.float8_e4m3fn, torch.float8_e4m3fnuz]
FLOATS = [torch.bfloat16, torch.float16, torch.float32]
BLOCKS, BLOCK_SIZE = 3, 4
SLOTS = torch.tensor([5, -1, 0, 11])


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def empty_cache(kv_heads: int, head_size: int, value_size: int, dtype: torch.dtype, *, static: bool = False) -> KVCache:
    cache = allocate_kv_cache(BLOCKS, BLOCK_SIZE, kv_heads, head_size, dtype, "cpu", value_size)
    for part in cache.tensors:
        part.zero_()
    if not static:
        return cache
    shape = BLOCKS, BLOCK_SIZE, kv_heads
    per_head = torch.linspace(0.02, 0.05, kv_heads).expand(shape)
    return KVCache(cache.key, cache.value, per_head, torch.tensor(0.03).expand(shape), static_scales=True)


def assert_same(got: KVCache, wanted: KVCache) -> None:
    """Scales and codes are the definition's. A tie may fall to the other side: a code of 4000."""
    for codes, scale, right, right_scale in (
        (got.key, got.key_scale, wanted.key, wanted.key_scale),
        (got.value, got.value_scale, wanted.value, wanted.value_scale),
    ):
        if scale is None or right_scale is None:
            assert torch.equal(codes, right)
            continue
        torch.testing.assert_close(scale, right_scale, rtol=1e-6, atol=0)
        assert (codes.float() != right.float()).float().mean() <= 1 / 4000


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [(torch.float32, torch.float16), *zip(FLOATS, SCALED, strict=True), (torch.bfloat16, torch.float8_e4m3fn)],
    ids=str,
)
@pytest.mark.parametrize(("kv_heads", "head_size", "value_size"), [(3, 80, 80), (1, 64, 128), (9, 192, 128)])
def test_every_cache_type(
    dtype: torch.dtype, kv_dtype: torch.dtype, kv_heads: int, head_size: int, value_size: int
) -> None:
    key, value = (randn(4, kv_heads, size, dtype=dtype, seed=size) for size in (head_size, value_size))
    key[2, 0] = 0.0  # a row of zeros has a scale all the same
    for static in (False, True) if kv_dtype in SCALED else (False,):
        caches = [empty_cache(kv_heads, head_size, value_size, kv_dtype, static=static) for _ in range(2)]
        write_kv(key, 40 * value, caches[0], SLOTS)
        reference.write_kv(key, 40 * value, caches[1], SLOTS)
        assert_same(*caches)


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.int8], ids=str)
def test_values_within_keys_are_written_once(kv_dtype: torch.dtype) -> None:
    caches = []
    key = randn(4, 1, 576, dtype=torch.bfloat16)
    for write in (write_kv, reference.write_kv):
        whole = empty_cache(1, 576, 16, kv_dtype)
        cache = KVCache(whole.key, whole.key[..., :512], whole.key_scale, whole.key_scale)
        write(key, key[..., :512], cache, SLOTS)
        caches.append(cache)
    assert_same(*caches)


def rotated_in_double(
    q: Tensor, k: Tensor, table: Tensor, positions: Tensor, interleaved: bool, norms: list[Tensor] | None
) -> tuple[Tensor, Tensor]:
    """Norms and rotation by complex numbers, in float64."""
    angles = torch.complex(*table[positions].double().chunk(2, -1))[:, None]
    results = []
    for index, x in enumerate((q.double(), k.double())):
        if norms is not None:
            x = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * (norms[index].double() + 1.0)
        size = table.shape[-1]
        pairs = x[..., :size].unflatten(-1, (-1, 2) if interleaved else (2, -1))
        turned = torch.complex(*pairs.unbind(-1 if interleaved else -2)) * angles
        parts = torch.stack((turned.real, turned.imag), -1 if interleaved else -2).flatten(-2)
        results.append(torch.cat((parts, x[..., size:]), -1))
    return results[0], results[1]


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [*((dtype, None) for dtype in FLOATS), *zip(FLOATS, SCALED, strict=True)],
    ids=str,
)
@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_size", "rotary", "interleaved"),
    [(9, 3, 64, 64, False), (2, 1, 80, 32, True), (4, 4, 128, 96, False)],
)
def test_rope_and_write(
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None,
    with_norm: bool,
    heads: int,
    kv_heads: int,
    head_size: int,
    rotary: int,
    interleaved: bool,
) -> None:
    fused = randn(4, heads + 2 * kv_heads, head_size, dtype=dtype)
    q, k, v = fused.split((heads, kv_heads, kv_heads), dim=1)
    angles = randn(20, rotary // 2, seed=1)
    table, positions = torch.cat((angles.cos(), angles.sin()), -1), torch.tensor([3, 19, 0, 7])
    norms = [randn(head_size, dtype=dtype, seed=seed) for seed in (2, 3)] if with_norm else None
    expected_q, expected_k = rotated_in_double(q, k, table, positions, interleaved, norms)
    value = v.clone()
    cache = empty_cache(kv_heads, head_size, head_size, kv_dtype or dtype)
    out = rope_write_kv(q, k, v, table, positions, interleaved, cache, SLOTS, *(norms or (None, None)), 1e-5, 1.0)
    assert_near(out, expected_q)
    assert torch.equal(fused[:, heads + kv_heads :], value)
    wanted = empty_cache(kv_heads, head_size, head_size, kv_dtype or dtype)
    reference.write_kv(expected_k.float(), value, wanted, SLOTS)
    for got, right in zip(*(plain_values(part) for part in (cache, wanted)), strict=True):
        # One code of the largest, where float32 and float64 round to different sides.
        step = {None: 2 * ROUNDOFF[dtype], torch.int8: 1 / 127}.get(kv_dtype, 1 / 8)
        assert ((got - right).abs() <= step * right.abs().amax(-1, keepdim=True)).all()
        assert ((got - right).abs() > 4 * ROUNDOFF[dtype] * (right.abs() + 1)).float().mean() < 1 / 500


def plain_values(cache: KVCache) -> tuple[Tensor, Tensor]:
    return dequantize_kv(cache.key, cache.key_scale), dequantize_kv(cache.value, cache.value_scale)


def test_rope_and_write_of_nothing() -> None:
    q, k = torch.zeros(0, 4, 64), torch.zeros(0, 2, 64)
    empty = torch.zeros(0, dtype=torch.int64)
    cache = empty_cache(2, 64, 64, torch.float32)
    assert rope_write_kv(q, k, k, torch.zeros(3, 64), empty, False, cache, empty).shape == (0, 4, 64)
