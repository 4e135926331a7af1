"""The definition of a scaled KV cache against the formats' own, and what attention makes of it, sinks and ALiBi."""

from __future__ import annotations

import math

import pytest
import torch
from attention_cases import make_case
from twofold.kernels import reference
from twofold.kernels.kv_layout import KVCache, allocate_kv_cache, kv_block_bytes
from twofold.kernels.reference.kv_cache import dequantize_kv, quantize_kv
from twofold.kernels.torch_attention import sdpa_attention

SCALED = [torch.int8, torch.float8_e4m3fn, torch.float8_e4m3fnuz]
# Half a step of the code, relative to the largest of the row: 1/254; 3 mantissa bits: a sixteenth of each value.
STEP = {torch.int8: 0.5 / 127, torch.float8_e4m3fn: 2.0**-4, torch.float8_e4m3fnuz: 2.0**-4}


@pytest.mark.parametrize("dtype", SCALED, ids=str)
def test_codes_are_near_and_reach_the_limit(dtype):
    x = torch.randn(5, 3, 64, generator=torch.Generator().manual_seed(0)) * torch.tensor([1e-3, 1.0, 500.0])[:, None]
    codes, scale = quantize_kv(x, dtype)
    assert codes.dtype is dtype and scale.dtype is torch.float32 and scale.shape == (5, 3)
    largest = x.abs().amax(-1, keepdim=True)
    allowed = STEP[dtype] * (largest if dtype is torch.int8 else x.abs() + largest / 2**9)
    assert ((dequantize_kv(codes, scale) - x).abs() <= allowed * 1.001).all()
    limits = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e4m3fnuz: 224.0}
    assert torch.equal(codes.float().abs().amax(-1), torch.full((5, 3), limits[dtype]))


@pytest.mark.parametrize("dtype", SCALED, ids=str)
def test_zeros_and_values_beyond_a_static_scale(dtype):
    codes, scale = quantize_kv(torch.zeros(2, 8), dtype)
    assert torch.equal(dequantize_kv(codes, scale), torch.zeros(2, 8))
    x = torch.tensor([[-1e6, 1e6, 0.5, 0.0]])
    codes, scale = quantize_kv(x, dtype, torch.tensor([0.01]))
    limit = {torch.int8: 1.27, torch.float8_e4m3fn: 4.48, torch.float8_e4m3fnuz: 2.24}[dtype]
    torch.testing.assert_close(
        dequantize_kv(codes, scale), torch.tensor([[-limit, limit, 0.5, 0.0]]), atol=0.021, rtol=0
    )


@pytest.mark.parametrize("dtype", SCALED, ids=str)
@pytest.mark.parametrize("static", [False, True])
def test_writing_then_attending_is_attention_over_the_dequantized(dtype, static):
    lengths = [(20, 20), (1, 33), (3, 17)]
    case = make_case(lengths, num_heads=6, num_kv_heads=2, head_size=24, block_size=16, seed=3)
    cache = scaled_copy(case, dtype, static)
    expected = reference.paged_attention(case.query, case.cache, case.batch, 0.3)
    result = reference.paged_attention(case.query, cache, case.batch, 0.3)
    torch.testing.assert_close(result, expected, atol=0.1 if dtype is torch.int8 else 0.5, rtol=0)
    # And exactly attention over what the codes stand for.
    plain = KVCache(dequantize_kv(cache.key, cache.key_scale), dequantize_kv(cache.value, cache.value_scale))
    torch.testing.assert_close(result, reference.paged_attention(case.query, plain, case.batch, 0.3))
    torch.testing.assert_close(sdpa_attention(case.query, cache, case.batch, 0.3), result, atol=1e-5, rtol=1e-5)


def scaled_copy(case, dtype, static=False):
    """The same tokens in a scaled cache, written by the definition."""
    num_blocks, block_size, heads, size = case.key_cache.shape
    cache = allocate_kv_cache(num_blocks, block_size, heads, size, dtype, "cpu")
    if static:
        scales = [torch.tensor(value).expand(num_blocks, block_size, heads) for value in (0.04, 0.05)]
        cache = KVCache(cache.key, cache.value, *scales, static_scales=True)
    written = ~case.key_cache.isnan().any(-1).any(-1).flatten()
    slots = torch.arange(len(written))[written]
    key, value = (part.flatten(0, 1)[written] for part in (case.key_cache, case.value_cache))
    reference.write_kv(key, value, cache, slots)
    return cache


@pytest.mark.parametrize("dtype", [torch.float32, *SCALED], ids=str)
def test_negative_slots_are_skipped(dtype):
    cache = allocate_kv_cache(2, 4, 1, 8, dtype, "cpu")
    for part in cache.tensors:
        part.zero_()
    key = torch.ones(3, 1, 8)
    reference.write_kv(key, 2 * key, cache, torch.tensor([-1, 5, -1]))
    written = dequantize_kv(cache.value, cache.value_scale).flatten(0, 1)[:, 0, 0]
    torch.testing.assert_close(written, torch.tensor([0.0, 0, 0, 0, 0, 2, 0, 0]))


def test_sinks_and_alibi_are_what_the_papers_say():
    case = make_case([(1, 40), (5, 5)], num_heads=6, num_kv_heads=2, head_size=24, block_size=16, seed=5)
    sinks, slopes = torch.randn(6), torch.rand(6)
    result = reference.paged_attention(case.query, case.cache, case.batch, 0.3, sinks=sinks, alibi_slopes=slopes)
    starts = [0, 1]
    for row, (query_len, seq_len) in enumerate([(1, 40), (5, 5)]):
        for token in range(query_len):
            position = seq_len - query_len + token
            for head in range(6):
                query = case.query[starts[row] + token, head]
                terms, mixed = math.exp(sinks[head]), torch.zeros(24)
                for column in range(position + 1):
                    score = 0.3 * float(query @ case.keys[row][column, head // 3])
                    weight = math.exp(score - float(slopes[head]) * (position - column))
                    terms += weight
                    mixed += weight * case.values[row][column, head // 3]
                torch.testing.assert_close(result[starts[row] + token, head], mixed / terms, atol=1e-5, rtol=1e-4)


def test_values_of_another_size_and_values_within_keys():
    case = make_case([(4, 30)], num_heads=4, num_kv_heads=1, head_size=24, block_size=16)
    shared = KVCache(case.key_cache, case.key_cache[..., :16])
    expected = reference.paged_attention(case.query, KVCache(case.key_cache, case.key_cache), case.batch, 0.2)
    result = reference.paged_attention(case.query, shared, case.batch, 0.2)
    torch.testing.assert_close(result, expected[..., :16])
    torch.testing.assert_close(sdpa_attention(case.query, shared, case.batch, 0.2), result, atol=1e-5, rtol=1e-5)
    assert shared.value_is_key and shared.tensors == [case.key_cache]


def test_bytes_of_a_block_are_what_is_allocated():
    for dtype in (torch.float32, torch.bfloat16, *SCALED):
        cache = allocate_kv_cache(3, 8, 2, 24, dtype, "cpu", value_head_size=16)
        assert sum(part.nbytes for part in cache.tensors) == 3 * kv_block_bytes(8, 2, 24, dtype, 16)


@pytest.mark.parametrize("with_norm", [False, True])
def test_rope_and_write_is_its_parts(with_norm):
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(3, heads, 32, generator=generator) for heads in (4, 2, 2))
    table, positions, slots = torch.randn(9, 16, generator=generator), torch.tensor([1, 8, 3]), torch.tensor([4, 0, 9])
    caches = [allocate_kv_cache(2, 8, 2, 32, torch.float32, "cpu") for _ in range(2)]
    for part in (*caches[0].tensors, *caches[1].tensors):
        part.zero_()
    norms = [torch.randn(32, generator=generator) for _ in range(2)] if with_norm else [None, None]
    rotated = reference.rope_write_kv(q, k, v, table, positions, False, caches[0], slots, *norms, 1e-5, 1.0)
    if with_norm:
        q, k = (reference.rms_norm(part, weight, 1e-5, 1.0) for part, weight in zip((q, k), norms, strict=True))
    expected, k = reference.rope(q, k, table, positions, False)
    reference.write_kv(k, v, caches[1], slots)
    torch.testing.assert_close(rotated, expected)
    for got, wanted in zip(caches[0].tensors, caches[1].tensors, strict=True):
        torch.testing.assert_close(got, wanted)
