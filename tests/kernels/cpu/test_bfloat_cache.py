"""C attention over bfloat16 caches, and writes into them, against per-token float64 sums of the rounded numbers."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from attention_cases import AttentionCase, check_fused, expected_attention, make_case, queries_for
from twofold.kernels import reference
from twofold.kernels.cpu import fused
from twofold.kernels.cpu.attention import paged_attention, write_kv
from twofold.kernels.cpu.library import unavailable
from twofold.kernels.kernel_set import KernelSet
from twofold.kernels.kv_layout import KVCache, allocate_kv_cache
from twofold.kernels.problems import AttentionProblem
from twofold.platforms import cpu_threads, select_platform

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=f"no compiled kernels: {unavailable()}")

SHAPES = [
    (9, 3, 64, 16), (4, 4, 32, 8), (14, 2, 80, 16), (26, 2, 24, 4), (1, 1, 5, 1), (6, 1, 128, 64), (20, 1, 96, 32),
    (3, 3, 256, 16), (2, 1, 33, 16), (34, 2, 1, 3), (4, 2, 112, 48),
]  # fmt: skip
LENGTHS = [
    [(1, 1)],
    [(40, 40)],
    [(1, 130), (1, 128), (1, 300), (1, 2)],
    [(3, 20), (1, 1), (17, 145), (1, 129), (30, 290)],
    [(75, 600)],
]
MIXED = LENGTHS[3]


def bfloat_case(lengths: list[tuple[int, int]], **options: int | float) -> AttentionCase:
    """Keys and values are bfloat16 numbers, and so are float32 queries times 0.3 log2(e)."""
    case = make_case(lengths, dtype=torch.bfloat16, **options)  # type: ignore[arg-type]
    return dataclasses.replace(case, query=queries_for(case.query, 0.3))


def run(case: AttentionCase, window: int | None = None, soft_cap: float = 0.0) -> torch.Tensor:
    return paged_attention(case.query, case.cache, case.batch, 0.3, window, soft_cap)


def check(case: AttentionCase, window: int | None = None, soft_cap: float = 0.0) -> None:
    """A weight's rounding moves a result by at most 2^-8 of its share of the magnitudes; the rest is float32."""
    if soft_cap:
        case = dataclasses.replace(case, query=queries_for(case.query.bfloat16(), 0.3, soft_cap))
    expected = expected_attention(case, 0.3, window, soft_cap)
    magnitudes = dataclasses.replace(case, values=[value.abs() for value in case.values])
    limit = expected_attention(magnitudes, 0.3, window, soft_cap) * 2**-8 + 2e-5
    excess = (run(case, window, soft_cap).double() - expected).abs() / limit
    assert excess.max() <= 1.0, excess.max()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_attention(shape, lengths):
    heads, kv_heads, head_size, block_size = shape
    check(bfloat_case(lengths, num_heads=heads, num_kv_heads=kv_heads, head_size=head_size, block_size=block_size))


@pytest.mark.parametrize(
    ("window", "soft_cap"), [(1, 0.0), (7, 0.0), (33, 0.0), (128, 0.0), (200, 1.5), (None, 0.5), (4096, 30.0)]
)
def test_window_and_soft_cap(window, soft_cap):
    for lengths in (MIXED, LENGTHS[4]):
        check(bfloat_case(lengths, num_heads=6, num_kv_heads=2, head_size=64, block_size=16, seed=7), window, soft_cap)


def test_queries_are_rounded_where_products_are_of_bfloat16():
    """Beside the numbers that the cache was rounded from: as near as rounding the scores' operands allows."""
    case = bfloat_case(MIXED, num_heads=6, num_kv_heads=2, head_size=64, block_size=16)
    moved = dataclasses.replace(case, query=case.query * (1 + (torch.rand(case.query.shape) - 0.5) * 2**-8))
    expected = expected_attention(moved, 0.3)
    assert (run(moved).double() - expected).abs().max() < 0.05
    assert (run(moved).double() - expected).square().mean().sqrt() < 0.004


def test_large_scores_do_not_overflow():
    case = bfloat_case([(5, 200)], num_heads=2, num_kv_heads=1, head_size=64, block_size=16, spread=8.0)
    torch.testing.assert_close(run(case).double(), expected_attention(case, 0.3), atol=0.05, rtol=2**-8)


def test_a_context_of_one_token_gives_its_value_back():
    case = bfloat_case([(1, 1)] * 3, num_heads=6, num_kv_heads=2, head_size=80, block_size=16)
    values = torch.stack([value[0] for value in case.values]).float()
    assert torch.equal(run(case), values.repeat_interleave(3, dim=1))


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (0, 2, 3, 1), (2, 0, 1, 3), (3, 1, 0, 2)])
@pytest.mark.parametrize("head_size", [64, 40])
def test_any_strides_give_the_same_bits(order, head_size):
    case = bfloat_case(MIXED, num_heads=6, num_kv_heads=2, head_size=head_size, block_size=16)
    back = [order.index(i) for i in range(4)]
    caches = [cache.permute(order).contiguous().permute(back) for cache in (case.key_cache, case.value_cache)]
    wide = torch.randn(case.query.shape[0], 10, head_size)
    wide[:, 1:7] = case.query
    moved = dataclasses.replace(case, query=wide[:, 1:7], key_cache=caches[0], value_cache=caches[1])
    assert torch.equal(run(moved), run(case))


def part_of(case: AttentionCase, request: int, first: int, last: int) -> AttentionCase:
    """Query tokens first..last of one request alone, as a step that ends with the last of them."""
    start, end = case.batch.query_start_loc[request : request + 2].tolist()
    length = int(case.batch.seq_lens[request]) - (end - start) + last
    batch = dataclasses.replace(
        case.batch,
        query_start_loc=torch.tensor([0, last - first], dtype=torch.int32),
        seq_lens=torch.tensor([length], dtype=torch.int32),
        block_table=case.batch.block_table[request : request + 1],
        query_lens_host=(last - first,),
        seq_lens_host=(length,),
    )
    return dataclasses.replace(case, query=case.query[start + first : start + last], batch=batch)


@pytest.mark.parametrize(("shape", "window"), [((6, 2, 64, 16), None), ((6, 2, 64, 16), 50), ((5, 1, 80, 8), None),
                                               ((34, 2, 40, 16), 300)])  # fmt: skip
def test_a_row_does_not_depend_on_batch_mates_chunks_or_threads(shape, window):
    """One row, parts of a tile of rows, several tiles, several items; whole sections and single ones."""
    heads, kv_heads, head_size, block_size = shape
    case = bfloat_case(
        [(90, 733), (1, 77), (20, 20)], num_heads=heads, num_kv_heads=kv_heads, head_size=head_size,
        block_size=block_size,
    )  # fmt: skip
    whole = run(case, window)
    for count in (1, 2, 3):
        cpu_threads.set_num_threads(count)
        assert torch.equal(run(case, window), whole)
        for first, last in ((0, 1), (0, 4), (0, 5), (7, 60), (31, 90), (89, 90)):
            part = run(part_of(case, 0, first, last), window)
            assert torch.equal(part, whole[first:last]), (count, first, last)
        assert torch.equal(run(part_of(case, 2, 3, 17), window), whole[94:108])


def test_a_row_does_not_depend_on_what_lies_beyond_its_context():
    case = bfloat_case([(1, 45)], num_heads=6, num_kv_heads=2, head_size=64, block_size=16)
    before = run(case)
    assert before.isfinite().all()
    for beyond in (0.0, torch.inf):
        filled = [torch.where(cache.isnan(), beyond, cache) for cache in (case.key_cache, case.value_cache)]
        moved = [part.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2) for part in filled[:1]] + filled[1:]
        assert torch.equal(run(dataclasses.replace(case, key_cache=moved[0], value_cache=moved[1])), before)


@pytest.mark.parametrize("lengths", [[(1, 5)], [(1, 300)], [(5, 200)], [(60, 333), (1, 77)]])
@pytest.mark.parametrize("parts", [["query"], ["key_cache"], ["query", "key_cache", "value_cache"]])
def test_nan_is_never_swallowed(lengths, parts):
    case = bfloat_case(lengths, num_heads=6, num_kv_heads=2, head_size=64, block_size=16)
    broken = {part: torch.full_like(getattr(case, part), torch.nan) for part in parts}
    assert run(dataclasses.replace(case, **broken)).isnan().all()


@pytest.mark.parametrize("size", [64, 5, 130])
def test_write_rounds_to_nearest_even(size):
    """Ties, numbers that overflow, subnormals, infinities and NaN, all as torch rounds them."""
    bits = torch.randint(-(2**31), 2**31 - 1, (21, 3, 2 * size)).to(torch.int32)
    bits[::2] = bits[::2] & ~0xFFFF | 0x8000
    bits[1] = torch.tensor(0x7F7FFFFF)
    bits[2, 0] = torch.tensor(3)
    both = bits.view(torch.float32)
    key, value = both[..., :size], both[..., size:]
    shape = (4, 8, 3, size)
    ours, theirs = (allocate_kv_cache(*shape, torch.bfloat16, "cpu") for _ in range(2))
    for cache in (ours, theirs):
        cache.key.fill_(7)
        cache.value.fill_(7)
    slots = torch.tensor([*range(3, 23), -1])
    write_kv(key, value, ours, slots)
    reference.write_kv(key, value, theirs, slots)
    for one, two in ((ours.key, theirs.key), (ours.value, theirs.value)):
        assert torch.equal(one.isnan(), two.isnan())
        assert torch.equal(one.nan_to_num(0.5).view(torch.int16), two.nan_to_num(0.5).view(torch.int16))


def test_fused_equals_its_parts():
    case = bfloat_case([(1, 300), (7, 40), (20, 20)], num_heads=6, num_kv_heads=2, head_size=64, block_size=16)
    first, second = (KVCache(case.key_cache.clone(), case.value_cache.clone()) for _ in range(2))
    check_fused(case.batch, first, second)
    for one, two in zip(first.tensors, second.tensors, strict=True):
        assert torch.equal(one.nan_to_num(7.0), two.nan_to_num(7.0))


def test_they_are_what_the_cpu_gets():
    kernels = KernelSet(select_platform("cpu").spec)
    problem = AttentionProblem(
        num_heads=6, num_kv_heads=2, head_size=64, block_size=16, dtype=torch.float32, kv_dtype=torch.bfloat16
    )
    assert kernels.select("paged_attention", problem) is paged_attention
    assert kernels.select_fused("rope_write_attend", problem) is fused.rope_write_attend
