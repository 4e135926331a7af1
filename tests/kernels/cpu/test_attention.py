"""C attention and cache writes against per-token float64 sums, in every cache layout."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from attention_cases import AttentionCase, expected_attention, make_case
from twofold.kernels import reference
from twofold.kernels.cpu.attention import paged_attention, write_kv
from twofold.kernels.cpu.library import unavailable
from twofold.kernels.kv_layout import KVCache
from twofold.platforms import cpu_threads

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=f"no compiled kernels: {unavailable()}")

SHAPES = [(9, 3, 64, 16), (4, 4, 32, 8), (14, 2, 80, 16), (26, 2, 24, 4), (1, 1, 5, 1), (6, 1, 128, 64), (11, 1, 9, 16)]
LENGTHS = [
    [(1, 1)],
    [(40, 40)],
    [(1, 130), (1, 128), (1, 300), (1, 2)],
    [(3, 20), (1, 1), (17, 145), (1, 129), (30, 290)],
]


def run(case: AttentionCase, window: int | None = None, soft_cap: float = 0.0) -> torch.Tensor:
    return paged_attention(case.query, case.cache, case.batch, 0.3, window, soft_cap)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_attention(shape, lengths):
    heads, kv_heads, head_size, block_size = shape
    case = make_case(lengths, num_heads=heads, num_kv_heads=kv_heads, head_size=head_size, block_size=block_size)
    torch.testing.assert_close(run(case).double(), expected_attention(case, 0.3), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("tokens", [4, 5, 16, 17, 20, 33])
def test_a_prompt_whose_rows_fill_several_groups_of_one_tile(tokens):
    """Three rows per token: 20 tokens make two blocks of rows, of which the second starts inside a tile of keys."""
    lengths = [(tokens, tokens), (tokens, tokens + 131)]
    case = make_case(lengths, num_heads=9, num_kv_heads=3, head_size=64, block_size=16)
    result, expected = run(case).double(), expected_attention(case, 0.3)
    for row in range(2 * tokens):
        torch.testing.assert_close(result[row], expected[row], atol=1e-5, rtol=1e-5, msg=f"row {row}")


@pytest.mark.parametrize(
    ("window", "soft_cap"), [(1, 0.0), (7, 0.0), (128, 0.0), (200, 1.5), (None, 0.5), (4096, 30.0)]
)
def test_window_and_soft_cap(window, soft_cap):
    case = make_case(LENGTHS[3], num_heads=6, num_kv_heads=2, head_size=64, block_size=16, seed=7)
    expected = expected_attention(case, 0.3, window, soft_cap)
    torch.testing.assert_close(run(case, window, soft_cap).double(), expected, atol=1e-5, rtol=1e-5)


def test_large_scores_do_not_overflow():
    case = make_case([(5, 200)], num_heads=2, num_kv_heads=1, head_size=64, block_size=16, spread=8.0)
    torch.testing.assert_close(run(case).double(), expected_attention(case, 0.3), atol=1e-3, rtol=1e-4)


def test_random_mixtures():
    for seed in range(6):
        chance = random.Random(seed)
        lengths = []
        for _ in range(chance.randint(1, 6)):
            seq_len = chance.randint(1, 280)
            lengths.append((chance.choice([1, 1, chance.randint(1, min(seq_len, 30))]), seq_len))
        case = make_case(lengths, num_heads=4, num_kv_heads=2, head_size=32, block_size=16, seed=seed)
        window = chance.choice([None, chance.randint(1, 150)])
        torch.testing.assert_close(
            run(case, window).double(), expected_attention(case, 0.3, window), atol=1e-5, rtol=1e-5
        )


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (0, 2, 3, 1), (2, 0, 1, 3), (3, 1, 0, 2)])
def test_any_cache_strides_and_a_query_slice(order):
    case = make_case(LENGTHS[3], num_heads=6, num_kv_heads=2, head_size=64, block_size=16)
    back = [order.index(i) for i in range(4)]
    caches = [cache.permute(order).contiguous().permute(back) for cache in (case.key_cache, case.value_cache)]
    fused = torch.randn(case.query.shape[0], 10, 64)
    fused[:, 1:7] = case.query
    moved = dataclasses.replace(case, query=fused[:, 1:7], key_cache=caches[0], value_cache=caches[1])
    assert torch.equal(run(moved), run(case))


def test_a_row_does_not_depend_on_batch_mates_chunks_or_threads():
    case = make_case([(60, 333), (1, 77)], num_heads=6, num_kv_heads=2, head_size=64, block_size=16)
    whole = run(case)
    threads = cpu_threads.num_threads()
    try:
        for count in (1, 3):
            cpu_threads.set_num_threads(count)
            for first, last in ((0, 1), (0, 7), (7, 60), (59, 60)):
                batch = dataclasses.replace(
                    case.batch,
                    query_start_loc=torch.tensor([0, last - first], dtype=torch.int32),
                    seq_lens=torch.tensor([273 + last], dtype=torch.int32),
                    block_table=case.batch.block_table[:1],
                    query_lens_host=(last - first,),
                    seq_lens_host=(273 + last,),
                )
                part = dataclasses.replace(case, query=case.query[first:last], batch=batch)
                assert torch.equal(run(part), whole[first:last])
    finally:
        cpu_threads.set_num_threads(threads)


@pytest.mark.parametrize("window", [None, 300, 700])
def test_long_contexts_split_over_threads_give_the_same_rows(window):
    """Few requests: sections of a context are shared out; one thread, or many requests: each is done by one thread."""
    lengths = [(1, 1500), (20, 800), (1, 257)]
    case = make_case(lengths, num_heads=6, num_kv_heads=2, head_size=80, block_size=16)
    split = run(case, window, 2.0)
    torch.testing.assert_close(split.double(), expected_attention(case, 0.3, window, 2.0), atol=1e-5, rtol=1e-5)
    cpu_threads.set_num_threads(1)
    assert torch.equal(run(case, window, 2.0), split)
    for tokens in (1, 7):
        batch = dataclasses.replace(
            case.batch,
            query_start_loc=torch.tensor([0, tokens], dtype=torch.int32),
            seq_lens=torch.tensor([780 + tokens], dtype=torch.int32),
            block_table=case.batch.block_table[1:2],
            query_lens_host=(tokens,),
            seq_lens_host=(780 + tokens,),
        )
        part = dataclasses.replace(case, query=case.query[1 : 1 + tokens], batch=batch)
        for count in (1, 3):
            cpu_threads.set_num_threads(count)
            assert torch.equal(run(part, window, 2.0), split[1 : 1 + tokens])


@pytest.mark.parametrize("tokens", [1, 20])
def test_write_kv(tokens):
    case = make_case([(tokens, 50)], num_heads=2, num_kv_heads=3, head_size=24, block_size=8)
    fused = torch.randn(tokens, 3, 48)
    key, value = fused[..., :24], fused[..., 24:]
    key_cache, value_cache = case.key_cache.clone(), case.value_cache.clone()
    reference.write_kv(key, value, KVCache(key_cache, value_cache), case.batch.slot_mapping)
    write_kv(key, value, case.cache, case.batch.slot_mapping)
    torch.testing.assert_close(case.key_cache, key_cache, atol=0, rtol=0, equal_nan=True)
    torch.testing.assert_close(case.value_cache, value_cache, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("lengths", [[(1, 5)], [(1, 300)], [(5, 200)], [(60, 333), (1, 77)]])
@pytest.mark.parametrize("parts", [["query"], ["key_cache"], ["query", "key_cache", "value_cache"]])
def test_nan_is_never_swallowed(lengths, parts):
    """A context of which every score is NaN is not one in which nothing was seen."""
    case = make_case(lengths, num_heads=6, num_kv_heads=2, head_size=64, block_size=16)
    broken = {part: torch.full_like(getattr(case, part), torch.nan) for part in parts}
    assert run(dataclasses.replace(case, **broken)).isnan().all()
