"""C attention over int8 and fp8 caches, and writes into them, against the definition in torch."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from attention_cases import check_fused, expected_attention, make_case
from kv_codes import DTYPES, LIMITS, codes_of, in_codes, scales_of
from twofold.kernels.cpu import fused
from twofold.kernels.cpu.attention import paged_attention, write_kv
from twofold.kernels.cpu.library import unavailable
from twofold.kernels.kernel_set import KernelSet
from twofold.kernels.kv_layout import KVCache, allocate_kv_cache
from twofold.kernels.problems import AttentionProblem
from twofold.platforms import cpu_threads, select_platform

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=f"no compiled kernels: {unavailable()}")

SHAPES = [(9, 3, 64, 16), (4, 4, 32, 8), (14, 2, 80, 16), (26, 2, 24, 4), (1, 1, 5, 1), (6, 1, 128, 64), (11, 1, 9, 16)]
LENGTHS = [[(1, 130), (1, 128), (1, 300), (1, 2)], [(3, 20), (1, 1), (17, 145), (1, 129), (30, 290)]]
MIXED = LENGTHS[1]


def static_scales(dtype: torch.dtype, heads: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Calibrated scales that cut off what lies beyond about two standard deviations."""
    shape = () if heads is None else (heads,)
    return tuple(torch.full(shape, factor / LIMITS[dtype]) for factor in (2.0, 2.5))  # type: ignore[return-value]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_attention(shape, lengths, dtype):
    heads, kv_heads, head_size, block_size = shape
    case = make_case(lengths, num_heads=heads, num_kv_heads=kv_heads, head_size=head_size, block_size=block_size)
    cache, case = in_codes(case, dtype)
    result = paged_attention(case.query, cache, case.batch, 0.3)
    torch.testing.assert_close(result.double(), expected_attention(case, 0.3), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [None, 2])
def test_calibrated_scales_window_and_soft_cap(dtype, heads):
    case = make_case(MIXED, num_heads=6, num_kv_heads=2, head_size=64, block_size=16, seed=7)
    cache, case = in_codes(case, dtype, static_scales(dtype, heads))
    for window, soft_cap in ((7, 0.0), (128, 0.0), (200, 1.5), (None, 0.5)):
        result = paged_attention(case.query, cache, case.batch, 0.3, window, soft_cap)
        expected = expected_attention(case, 0.3, window, soft_cap)
        torch.testing.assert_close(result.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_code(dtype):
    """A context of one token gives its value back: all finite codes, read in place, copied, and by features."""
    codes = torch.arange(256).to(torch.uint8).view(dtype)
    codes = codes[codes.float().abs() <= LIMITS[dtype]]
    codes = torch.cat((codes, codes[: 256 - len(codes)]))
    for head_size, query_len in ((256, 1), (256, 20), (64, 1), (4, 1)):
        heads = 256 // head_size
        cache = allocate_kv_cache(2, 16, heads, head_size, dtype, "cpu")
        cache.key.fill_(0)
        cache.value.copy_(codes.view(heads, head_size))
        cache.key_scale.fill_(1.0)
        cache.value_scale.fill_(0.37)
        lengths = [(query_len, query_len)]
        case = make_case(lengths, num_heads=heads, num_kv_heads=heads, head_size=head_size, block_size=16)
        batch = dataclasses.replace(case.batch, block_table=torch.tensor([[0, 1]], dtype=torch.int32))
        result = paged_attention(case.query, cache, batch, 0.3)
        expected = (codes.double() * torch.tensor(0.37).double()).view(heads, head_size)
        torch.testing.assert_close(result.double(), expected.expand(query_len, -1, -1), atol=0, rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (0, 2, 3, 1), (3, 1, 0, 2)])
def test_any_strides_give_the_same_bits(order, dtype):
    case = make_case(MIXED, num_heads=6, num_kv_heads=2, head_size=64, block_size=16)
    cache, case = in_codes(case, dtype)
    back = [order.index(i) for i in range(4)]
    parts = [part.permute(order).contiguous().permute(back) for part in (cache.key, cache.value)]
    moved = KVCache(*parts, cache.key_scale.contiguous(), cache.value_scale.mT.contiguous().mT)
    same = [paged_attention(case.query, which, case.batch, 0.3) for which in (cache, moved)]
    assert torch.equal(*same)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_does_not_depend_on_batch_mates_chunks_or_threads(dtype):
    """Few rows decode codes as they read them, many decode a tile once: the same bits."""
    case = make_case([(60, 733), (1, 77)], num_heads=6, num_kv_heads=2, head_size=64, block_size=16)
    cache, case = in_codes(case, dtype)
    whole = paged_attention(case.query, cache, case.batch, 0.3)
    threads = cpu_threads.num_threads()
    try:
        for count in (1, 3):
            cpu_threads.set_num_threads(count)
            assert torch.equal(paged_attention(case.query, cache, case.batch, 0.3), whole)
            for first, last in ((0, 1), (0, 4), (0, 5), (7, 60), (59, 60)):
                batch = dataclasses.replace(
                    case.batch,
                    query_start_loc=torch.tensor([0, last - first], dtype=torch.int32),
                    seq_lens=torch.tensor([673 + last], dtype=torch.int32),
                    block_table=case.batch.block_table[:1],
                    query_lens_host=(last - first,),
                    seq_lens_host=(673 + last,),
                )
                part = paged_attention(case.query[first:last], cache, batch, 0.3)
                assert torch.equal(part, whole[first:last]), (count, first, last)
    finally:
        cpu_threads.set_num_threads(threads)


def write(
    key: torch.Tensor, value: torch.Tensor, dtype: torch.dtype, scales: tuple[torch.Tensor, torch.Tensor] | None = None
) -> KVCache:
    """Write tokens into slots 0.. of a fresh cache whose other slots hold a mark."""
    tokens, kv_heads, head_size = key.shape
    cache = allocate_kv_cache(tokens // 8 + 2, 8, kv_heads, head_size, dtype, "cpu", static_scales=scales)
    for part in (cache.key, cache.value, *(() if scales else (cache.key_scale, cache.value_scale))):
        part.fill_(7)
    padded = [torch.cat((part, part[:1] + 1e3)) for part in (key, value)]
    write_kv(*padded, cache, torch.tensor([*range(tokens), -1]))
    return cache


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_size", [64, 80, 5, 130])
@pytest.mark.parametrize("given", [None, "layer", "head"])
def test_write(head_size, dtype, given):
    both = torch.randn(21, 3, 2 * head_size) * torch.logspace(-3, 3, 21)[:, None, None]
    both[4] = 0.0
    both[5, 1, :head_size] = -0.0
    key, value = both[..., :head_size], both[..., head_size:]
    scales = None if given is None else static_scales(dtype, 3 if given == "head" else None)
    cache = write(key, value, dtype, scales)
    for x, part, scale in ((key, cache.key, cache.key_scale), (value, cache.value, cache.value_scale)):
        flat, stored = part.flatten(0, 1).view(torch.uint8), scale.flatten(0, 1)
        if given is None:
            assert torch.equal(stored[:21], scales_of(x, dtype)) and (stored[21:] == 7).all()
        assert torch.equal(flat[:21], codes_of(x, stored[:21], dtype).view(torch.uint8))
        assert torch.equal(flat[21:], torch.full_like(part.flatten(0, 1)[21:].float(), 7).to(dtype).view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rounding_is_to_the_nearest_code_and_to_even_on_ties(dtype):
    codes = torch.arange(256).to(torch.uint8).view(dtype).float()
    codes = codes[codes.abs() <= LIMITS[dtype]].unique()
    halves = (codes[1:] + codes[:-1]) / 2
    points = torch.cat([torch.nextafter(halves, torch.tensor(way)) for way in (-1e9, 1e9)] + [halves, codes])
    points = torch.cat((points, torch.tensor([1e-30, -1e-30, 1e30, -1e30, LIMITS[dtype] * 1.01])))[None, None]
    cache = write(points, points, dtype, (torch.tensor(1.0), torch.tensor(1.0)))
    expected = codes_of(points, torch.ones(1, 1), dtype)[0, 0]
    assert torch.equal(cache.key[0, 0, 0].float(), expected.float())
    assert torch.equal(cache.value[0, 0, 0].float(), expected.float())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(dtype, bad):
    key = torch.randn(3, 1, 64)
    key[1, 0, 40] = bad
    cache = write(key, key, dtype)
    assert not cache.key_scale.flatten(0, 1)[1].isfinite().any()
    assert cache.key_scale.flatten(0, 1)[[0, 2]].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("given", [False, True])
def test_fused_equals_its_parts(dtype, given):
    case = make_case([(1, 300), (7, 40), (20, 20)], num_heads=6, num_kv_heads=2, head_size=64, block_size=16)
    scales = static_scales(dtype) if given else None
    (first, _), (second, _) = (in_codes(case, dtype, scales) for _ in range(2))
    check_fused(case.batch, first, second)
    for one, two in zip(first.tensors, second.tensors, strict=True):
        assert torch.equal(one.float(), two.float())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_they_are_what_the_cpu_gets(dtype):
    kernels = KernelSet(select_platform("cpu").spec)
    problem = AttentionProblem(
        num_heads=6, num_kv_heads=2, head_size=64, block_size=16, dtype=torch.float32, kv_dtype=dtype
    )
    assert kernels.select("paged_attention", problem) is paged_attention
    assert kernels.select_fused("rope_write_attend", problem) is fused.rope_write_attend
