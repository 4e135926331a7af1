"""Fused operations equal their parts bit for bit, and models use them only where they exist."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from attention_cases import make_case
from kv_codes import LIMITS, in_codes, scales_of
from twofold.kernels import reference
from twofold.kernels.cpu import attention, elementwise, fused
from twofold.kernels.cpu.library import unavailable
from twofold.kernels.kernel_set import KernelSet
from twofold.kernels.kv_layout import KVCache
from twofold.kernels.problems import AttentionProblem
from twofold.platforms import select_platform

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=f"no compiled kernels: {unavailable()}")


@pytest.mark.parametrize("lengths", [[(1, 1)], [(20, 20)], [(1, 300), (7, 40), (1, 3)]])
@pytest.mark.parametrize(("head_size", "rotary"), [(64, 64), (80, 32)])
@pytest.mark.parametrize(("window", "soft_cap"), [(None, 0.0), (16, 5.0)])
def test_rope_write_attend(lengths, head_size, rotary, window, soft_cap):
    case = make_case(lengths, num_heads=6, num_kv_heads=2, head_size=head_size, block_size=16)
    tokens = case.query.shape[0]
    generator = torch.Generator().manual_seed(tokens)
    qkv = torch.randn(tokens, 10 * head_size, generator=generator)
    table = torch.randn(400, rotary, generator=generator)
    positions = torch.randint(0, 400, (tokens,), generator=generator)
    caches = case.key_cache.clone(), case.value_cache.clone()
    result = fused.rope_write_attend(qkv.clone(), table, positions, KVCache(*caches), case.batch, 0.3, window, soft_cap)

    q, k, v = qkv.view(tokens, 10, head_size).split((6, 2, 2), dim=1)
    q, k = elementwise.rope(q, k, table, positions, False)
    attention.write_kv(k, v, case.cache, case.batch.slot_mapping)
    expected = attention.paged_attention(q, case.cache, case.batch, 0.3, window, soft_cap)
    assert torch.equal(result, expected.flatten(1))
    for cache, right in zip(caches, (case.key_cache, case.value_cache), strict=True):
        torch.testing.assert_close(cache, right, atol=0, rtol=0, equal_nan=True)


# Query heads, KV heads, head size, rotated features, block size.
UGLY = [
    (1, 1, 5, 4, 1),
    (9, 3, 64, 64, 16),
    (13, 1, 24, 8, 3),
    (7, 7, 40, 40, 8),
    (22, 2, 96, 48, 32),
    (5, 1, 33, 30, 16),
]
STEPS = [[(1, 1)], [(50, 50), (1, 259), (17, 31)], [(1, 16), (3, 300), (1, 17), (40, 170)], [(130, 130)]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("shape", UGLY, ids=str)
@pytest.mark.parametrize("window", [None, 20])
def test_keys_are_rotated_written_and_attended_to_as_defined(shape, dtype, window):
    """Against plain torch: what is in the cache afterwards, what was there before, and what comes out.

    New tokens of several requests begin and end inside blocks; the last of each request is another's batch mate.
    """
    heads, kv_heads, head_size, rotary, block_size = shape
    for seed, lengths in enumerate(STEPS):
        stored = dtype if dtype is torch.bfloat16 else torch.float32
        case = make_case(
            lengths, num_heads=heads, num_kv_heads=kv_heads, head_size=head_size, block_size=block_size, dtype=stored
        )
        cache = in_codes(case, dtype)[0] if dtype in LIMITS else case.cache
        before = [None if part is None else part.clone() for part in parts(cache)]
        tokens, scale = case.query.shape[0], head_size**-0.5
        generator = torch.Generator().manual_seed(seed)
        qkv = torch.randn(tokens, heads + 2 * kv_heads, head_size, generator=generator)
        angles = torch.rand(400, rotary // 2, generator=generator) * 6.3
        table = torch.cat((angles.cos(), angles.sin()), dim=1)
        positions = torch.randint(0, 400, (tokens,), generator=generator)
        result = fused.rope_write_attend(qkv.flatten(1).clone(), table, positions, cache, case.batch, scale, window)

        q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)
        q, k = reference.rope(q, k, table, positions, False)
        slots = case.batch.slot_mapping
        for x, codes, scales in ((k, cache.key, cache.key_scale), (v, cache.value, cache.value_scale)):
            blocks, offsets = slots // block_size, slots % block_size
            got = codes[blocks, offsets].float()
            if scales is not None:
                right = scales_of(x, dtype)
                torch.testing.assert_close(scales[blocks, offsets], right, atol=0, rtol=1e-5)
                got *= right[..., None]
            assert ((got - x).abs() <= half_step(x, dtype) * 1.01 + 2e-6).all()
        for part, old in zip(parts(cache), before, strict=True):
            if part is not None:
                untouched = torch.ones(part.shape[:2], dtype=torch.bool)
                untouched[slots // block_size, slots % block_size] = False
                assert same(part[untouched], old[untouched])
        expected = reference.paged_attention(q, cache, case.batch, scale, window).flatten(1)
        tolerance = 2e-2 if dtype is torch.bfloat16 else 2e-5  # AMX takes queries and weights in bfloat16
        torch.testing.assert_close(result, expected, atol=tolerance, rtol=tolerance)


def half_step(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """How far from x [..., D] the nearest number of a cache's type may be; one with scales has one per row."""
    if dtype is torch.int8:
        return scales_of(x, dtype)[..., None] / 2
    if dtype is torch.float8_e4m3fn:
        return (x.abs() * 2**-4).maximum(scales_of(x, dtype)[..., None] * 2**-10)
    return x.abs() * (2**-8 if dtype is torch.bfloat16 else 0.0)


def parts(cache: KVCache) -> tuple[torch.Tensor | None, ...]:
    return cache.key, cache.value, cache.key_scale, cache.value_scale


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def test_tokens_without_a_slot_are_not_written():
    """Padding of a recorded step: nothing of the cache changes for it."""
    case = make_case([(3, 20), (2, 33)], num_heads=6, num_kv_heads=2, head_size=64, block_size=16)
    slots = case.batch.slot_mapping.clone()
    slots[1] = slots[4] = -1
    batch = dataclasses.replace(case.batch, slot_mapping=slots)
    before = [case.key_cache.clone(), case.value_cache.clone()]
    qkv, table = torch.randn(5, 640), torch.randn(40, 64)
    fused.rope_write_attend(qkv.clone(), table, torch.arange(5), case.cache, batch, 0.3)
    _, k, v = qkv.view(5, 10, 64).split((6, 2, 2), dim=1)
    k = reference.rope(k, k, table, torch.arange(5), False)[1]
    reference.write_kv(k, v, KVCache(*before), slots)
    for got, right in zip((case.key_cache, case.value_cache), before, strict=True):
        torch.testing.assert_close(got, right, atol=2e-6, rtol=1e-6, equal_nan=True)


def test_a_fused_operation_is_optional():
    kernels = KernelSet(select_platform("cpu").spec)
    problem = AttentionProblem(
        num_heads=6, num_kv_heads=2, head_size=64, block_size=16, dtype=torch.float32, kv_dtype=torch.float32
    )
    assert kernels.select_fused("rope_write_attend", problem) is fused.rope_write_attend
    half = dataclasses.replace(problem, dtype=torch.bfloat16, kv_dtype=torch.bfloat16)
    assert kernels.select_fused("rope_write_attend", half) is None
    assert kernels.select_fused("no_such_operation", problem) is None
    assert [row["op"] for row in kernels.report()] == ["rope_write_attend"]
