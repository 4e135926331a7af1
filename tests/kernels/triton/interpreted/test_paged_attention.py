"""Paged attention against the torch definition in float64: ugly batches, head shapes, masks, splits, cache layouts."""

from __future__ import annotations

import functools
import random

import pytest
import torch
from paged_batches import MIXED, SMALL, make_batch
from tolerance import assert_near
from torch import Tensor
from twofold.kernels import reference
from twofold.kernels.kv_layout import KVCache
from twofold.kernels.triton.attention_splits import num_splits
from twofold.kernels.triton.launch_table import AttentionLaunch
from twofold.kernels.triton.paged_attention import launch_attention, paged_attention

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def make_cache(
    num_blocks: int, block_size: int, kv_heads: int, head_size: int, dtype: torch.dtype, seed: int
) -> Tensor:
    """[N,S,G,D], physically [N,G,S,D]; block 0, which no request owns, is nan."""
    generator = torch.Generator().manual_seed(seed)
    cache = torch.randn(num_blocks, kv_heads, block_size, head_size, generator=generator).to(dtype)
    cache[0] = float("nan")
    return cache.transpose(1, 2)


def check(
    lengths: list[tuple[int, int]],
    heads: tuple[int, int],
    head_size: int,
    dtype: torch.dtype,
    *,
    block_size: int = 16,
    window: int | None = None,
    soft_cap: float = 0.0,
    kv_dtype: torch.dtype | None = None,
    launch: AttentionLaunch | None = None,
    splits: int = 1,
    seed: int = 0,
) -> None:
    batch, num_blocks = make_batch(lengths, block_size, seed)
    caches = [make_cache(num_blocks, block_size, heads[1], head_size, kv_dtype or dtype, seed + n) for n in (1, 2)]
    tokens = sum(batch.query_lens_host)
    fused = torch.randn(tokens, heads[0] + 2, head_size, generator=torch.Generator().manual_seed(seed)).to(dtype)
    query, scale = fused[:, 1:-1], head_size**-0.5
    # The definition takes whole blocks, so it is given the unowned tail as zeros.
    wide = [torch.nan_to_num(cache.double()) for cache in caches]
    expected = reference.paged_attention(query.double(), KVCache(*wide), batch, scale, window, soft_cap)
    if launch is None:
        actual = paged_attention(query, KVCache(*caches), batch, scale, window, soft_cap)
    else:
        actual = launch_attention(query, KVCache(*caches), batch, scale, window, soft_cap, launch=launch, splits=splits)
    # tanh from an exponential has an absolute error of one unit of the cap.
    assert_near(actual, expected, factor=2.0 + soft_cap / 10)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("heads", "head_size"), [((9, 3), 64), ((4, 1), 128), ((2, 2), 80), ((7, 1), 96), ((2, 1), 256)]
)
def test_mixed_batches(dtype: torch.dtype, heads: tuple[int, int], head_size: int) -> None:
    check(MIXED, heads, head_size, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_only_decoding(dtype: torch.dtype) -> None:
    check([(1, 1), (1, 16), (1, 17), (1, 130)], (6, 2), 64, dtype)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("window", [None, 9])
def test_requests_without_a_context_read_nothing(splits: int, window: int | None) -> None:
    """Such rows pad a recorded step; block tables of theirs are all block 0, which is nan."""
    batch, num_blocks = make_batch([(1, 130), (1, 1), (1, 40)], 16, 0)
    caches = KVCache(*(make_cache(num_blocks, 16, 2, 64, torch.float32, seed) for seed in (1, 2)))
    query = torch.randn(3, 4, 64, generator=torch.Generator().manual_seed(0))
    launch = AttentionLaunch(block_m=16, tile=16, num_warps=4, num_stages=1)
    run = functools.partial(launch_attention, query, caches, scale=0.1, sliding_window=window, launch=launch)
    whole = run(batch=batch, splits=splits)
    batch.seq_lens[1:] = 0
    batch.block_table[1:] = 0
    assert torch.equal(run(batch=batch, splits=splits)[0], whole[0])


@pytest.mark.parametrize("window", [1, 7, 16, 500])
def test_sliding_window(window: int) -> None:
    check(MIXED, (4, 2), 64, torch.float32, window=window)
    check([(1, 1), (1, 90)], (4, 2), 64, torch.bfloat16, window=window)


@pytest.mark.parametrize("soft_cap", [0.5, 30.0])
def test_soft_cap(soft_cap: float) -> None:
    check(MIXED, (4, 2), 64, torch.float32, soft_cap=soft_cap)
    check(MIXED, (4, 2), 64, torch.bfloat16, soft_cap=soft_cap, window=12)


@pytest.mark.parametrize("block_size", [1, 16, 48, 128])
def test_block_sizes(block_size: int) -> None:
    check(MIXED, (4, 2), 64, torch.float32, block_size=block_size)


@pytest.mark.parametrize("kv_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_cache_of_another_dtype(dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    check([(1, 40), (4, 20)], (4, 2), 64, dtype, kv_dtype=kv_dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("splits", [2, 3, 8])
def test_split_contexts_agree(dtype: torch.dtype, splits: int) -> None:
    check([(1, 130), (1, 5), (2, 77)], (9, 3), 64, dtype, launch=SMALL, splits=splits)


def test_split_contexts_with_window_and_cap() -> None:
    check([(1, 130), (1, 5)], (4, 1), 128, torch.float32, launch=SMALL, splits=5, window=40, soft_cap=20.0)


@pytest.mark.parametrize("tile", [16, 64])
@pytest.mark.parametrize("block_m", [16, 64])
def test_tile_shapes(block_m: int, tile: int) -> None:
    check(MIXED, (6, 2), 64, torch.float32, launch=AttentionLaunch(block_m, tile, 4, 1))


def test_more_query_heads_per_kv_head_than_rows_of_a_tile() -> None:
    check([(1, 20), (3, 9)], (40, 1), 64, torch.float32, launch=SMALL)


def test_requests_without_queries_and_batches_without_tokens() -> None:
    check([(0, 12), (1, 20), (0, 0), (0, 33), (2, 2), (0, 5)], (4, 2), 64, torch.float32)
    check([(0, 12)], (4, 2), 64, torch.float32)


def test_strides_of_every_kind() -> None:
    batch, num_blocks = make_batch([(2, 20), (1, 33)], 16)
    pool = torch.randn(2, 64, num_blocks, 2, 16, generator=torch.Generator().manual_seed(5))
    key, value = (half.permute(1, 3, 2, 0) for half in pool)
    query = torch.randn(3, 64, 4, generator=torch.Generator().manual_seed(6)).transpose(1, 2)
    expected = reference.paged_attention(query.double(), KVCache(key.double(), value.double()), batch, 0.125)
    assert_near(paged_attention(query, KVCache(key, value), batch, 0.125), expected)


def test_number_of_splits() -> None:
    long, _ = make_batch([(1, 8192)], 16)
    assert num_splits(long, 8, None, 132) == 32
    assert num_splits(long, 8, 1024, 132) == 4
    assert num_splits(long, 132, None, 132) == 1
    short, _ = make_batch([(1, 100)], 16)
    assert num_splits(short, 1, None, 132) == 1


def test_large_scores_do_not_overflow() -> None:
    batch, num_blocks = make_batch([(1, 40), (3, 3)], 16)
    caches = [100 * make_cache(num_blocks, 16, 2, 64, torch.float16, seed) for seed in (1, 2)]
    query = 100 * torch.randn(4, 4, 64, generator=torch.Generator().manual_seed(1)).half()
    wide = [torch.nan_to_num(cache.double()) for cache in caches]
    expected = reference.paged_attention(query.double(), KVCache(*wide), batch, 0.125)
    assert_near(paged_attention(query, KVCache(*caches), batch, 0.125), expected, scale=100.0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_random_batches(seed: int) -> None:
    draw = random.Random(seed)
    group, kv_heads = draw.choice([1, 2, 3, 4, 5, 8, 16]), draw.choice([1, 2, 3])
    lengths = []
    for _ in range(draw.randint(1, 5)):
        query_len = draw.choice([0, 1, 1, 1, 2, 15, 16, 17, 40])
        lengths.append((query_len, query_len + draw.choice([0, 1, 15, 16, 17, 100])))
    check(
        lengths,
        (group * kv_heads, kv_heads),
        draw.choice([64, 80, 96, 112, 128, 192, 256]),
        draw.choice(DTYPES),
        block_size=draw.choice([16, 32, 64]),
        window=draw.choice([None, None, 1, 10, 64]),
        soft_cap=draw.choice([0.0, 0.0, 20.0]),
        launch=AttentionLaunch(draw.choice([16, 32, 64]), draw.choice([16, 32, 64]), 4, 1),
        splits=draw.choice([1, 1, 2, 4, 7]),
        seed=seed,
    )
