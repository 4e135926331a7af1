"""Paged attention over scaled caches, with sinks, ALiBi, other values and any group, against float64."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from paged_batches import MIXED, SMALL, make_batch
from tolerance import assert_near
from torch import Tensor
from twofold.kernels import reference
from twofold.kernels.kv_layout import KVCache
from twofold.kernels.reference.kv_cache import dequantize_kv, quantize_kv
from twofold.kernels.triton.launch_table import AttentionLaunch
from twofold.kernels.triton.paged_attention import launch_attention, paged_attention

FLOATS = [torch.bfloat16, torch.float16, torch.float32]
SCALED = [torch.int8, torch.float8_e4m3fn, torch.float8_e4m3fnuz]
EDGES = [(1, 1), (1, 16), (1, 32), (3, 35)]


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A problem; ``within``: values are the keys' first features. ``spread``: of the magnitudes of tokens."""

    lengths: list[tuple[int, int]]
    heads: tuple[int, int] = (4, 2)
    head_size: int = 64
    value_size: int | None = None
    within: bool = False
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype | None = None
    static: bool = False
    block_size: int = 16
    window: int | None = None
    soft_cap: float = 0.0
    sinks: bool = False
    alibi: bool = False
    launch: AttentionLaunch | None = None
    splits: int = 1
    spread: float = 1.0
    seed: int = 0


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make_cache(wanted: Wanted, num_blocks: int) -> tuple[KVCache, KVCache]:
    """(the cache, the same in float64 without scales). Block 0, which no request owns, holds what breaks a sum."""
    shape = num_blocks, wanted.block_size, wanted.heads[1]
    value_size = wanted.value_size or wanted.head_size
    magnitudes = wanted.spread ** randn(*shape, 1, seed=wanted.seed + 3)
    key = randn(*shape, wanted.head_size, seed=wanted.seed + 1)
    value = randn(*shape, value_size, seed=wanted.seed + 2) * magnitudes
    dtype = wanted.kv_dtype or wanted.dtype
    if dtype.itemsize > 1:
        key, value = key.to(dtype), value.to(dtype)
        value = key[..., :value_size] if wanted.within else value
        plain = KVCache(key.double(), value.double())
        key[0] = value[0] = float("nan")
        return KVCache(key, value), plain
    if wanted.static:
        scales = torch.linspace(0.02, 0.04, shape[2]).expand(shape), torch.tensor(0.03).expand(shape)
    else:
        scales = quantize_kv(key, dtype)[1], quantize_kv(value, dtype)[1]
    (key, key_scale), (value, value_scale) = (
        quantize_kv(part, dtype, scale) for part, scale in zip((key, value), scales, strict=True)
    )
    if wanted.within:
        value, value_scale = key[..., :value_size], key_scale
    plain = KVCache(dequantize_kv(key, key_scale.double()), dequantize_kv(value, value_scale.double()))
    if not wanted.static:
        key_scale[0] = value_scale[0] = float("nan")
    else:
        key_scale, value_scale = scales
    return KVCache(key, value, key_scale, value_scale, wanted.static), plain


def check(wanted: Wanted) -> None:
    batch, num_blocks = make_batch(wanted.lengths, wanted.block_size, wanted.seed)
    cache, plain = make_cache(wanted, num_blocks)
    num_heads = wanted.heads[0]
    query = randn(sum(batch.query_lens_host), num_heads, wanted.head_size, seed=wanted.seed).to(wanted.dtype)
    extras = {
        "sinks": randn(num_heads, seed=wanted.seed + 5).to(wanted.dtype) if wanted.sinks else None,
        "alibi_slopes": 2.0 ** -torch.arange(1.0, num_heads + 1) if wanted.alibi else None,
    }
    common = (batch, wanted.head_size**-0.5, wanted.window, wanted.soft_cap)
    expected = reference.paged_attention(query.double(), plain, *common, **extras)
    if wanted.launch is None:
        actual = paged_attention(query, cache, *common, **extras)
    else:
        actual = launch_attention(query, cache, *common, **extras, launch=wanted.launch, splits=wanted.splits)
    # tanh from an exponential has an absolute error of one unit of the cap; the terms are values, rounded to the dtype.
    scale = plain.value.abs().max().item() / 4 if wanted.spread > 1 else 1.0
    assert_near(actual, expected, factor=2.0 + wanted.soft_cap / 10, scale=scale)


@pytest.mark.parametrize("kv_dtype", SCALED, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("static", [False, True])
def test_scaled_caches(dtype: torch.dtype, kv_dtype: torch.dtype, static: bool) -> None:
    check(Wanted(lengths=EDGES, dtype=dtype, kv_dtype=kv_dtype, static=static))
    check(Wanted(lengths=MIXED[3:], dtype=dtype, kv_dtype=kv_dtype, static=static, head_size=80, window=20))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_values_of_very_different_size_keep_their_bits(dtype: torch.dtype) -> None:
    """In float16 a probability times the scale of a small value has few bits or none."""
    check(Wanted(lengths=[(1, 90), (4, 60)], dtype=dtype, kv_dtype=torch.int8, spread=30.0))


@pytest.mark.parametrize("head_size", [64, 96, 128, 160, 192, 256])
@pytest.mark.parametrize("kv_dtype", [None, torch.int8], ids=str)
def test_head_sizes(head_size: int, kv_dtype: torch.dtype | None) -> None:
    check(Wanted(lengths=EDGES, head_size=head_size, kv_dtype=kv_dtype))


@pytest.mark.parametrize("splits", [1, 3, 8])
@pytest.mark.parametrize("kv_dtype", [None, torch.float8_e4m3fn], ids=str)
def test_sinks_count_once_in_split_contexts(splits: int, kv_dtype: torch.dtype | None) -> None:
    lengths = [(1, 130), (1, 5), (2, 77)]
    wanted = Wanted(lengths=lengths, sinks=True, kv_dtype=kv_dtype, launch=SMALL, splits=splits, dtype=torch.float32)
    check(wanted)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_sinks_and_alibi(dtype: torch.dtype) -> None:
    check(Wanted(lengths=MIXED, dtype=dtype, sinks=True))
    check(Wanted(lengths=MIXED, dtype=dtype, alibi=True))
    check(Wanted(lengths=MIXED, dtype=dtype, alibi=True, sinks=True, window=9, soft_cap=20.0, heads=(6, 2)))


def test_a_sink_of_minus_infinity_is_none() -> None:
    batch, num_blocks = make_batch(EDGES, 16)
    cache, _ = make_cache(Wanted(lengths=EDGES, dtype=torch.float32), num_blocks)
    query, sinks = randn(6, 4, 64, seed=4), torch.full((4,), float("-inf"))
    plain = paged_attention(query, cache, batch, 0.1)
    torch.testing.assert_close(paged_attention(query, cache, batch, 0.1, sinks=sinks), plain)


@pytest.mark.parametrize("kv_dtype", [None, torch.int8, torch.float8_e4m3fnuz], ids=str)
@pytest.mark.parametrize("num_heads", [4, 40])
def test_latent_attention(num_heads: int, kv_dtype: torch.dtype | None) -> None:
    shape = {"heads": (num_heads, 1), "head_size": 576, "value_size": 512, "within": True, "kv_dtype": kv_dtype}
    check(Wanted(lengths=[(1, 33), (2, 16)], **shape))
    check(Wanted(lengths=[(1, 70)], launch=SMALL, splits=3, dtype=torch.float16, **shape))


@pytest.mark.parametrize(("head_size", "value_size"), [(192, 128), (64, 128), (80, 24)])
def test_values_of_another_size(head_size: int, value_size: int) -> None:
    check(Wanted(lengths=EDGES, head_size=head_size, value_size=value_size))
    check(Wanted(lengths=EDGES, head_size=head_size, value_size=value_size, launch=SMALL, splits=2))


def test_values_within_keys_that_are_no_whole_tile() -> None:
    check(Wanted(lengths=EDGES, head_size=80, value_size=48, within=True))


@pytest.mark.parametrize("heads", [(40, 1), (71, 1), (128, 1), (66, 2)])
def test_more_query_heads_per_kv_head_than_rows_of_a_tile(heads: tuple[int, int]) -> None:
    check(Wanted(lengths=[(1, 20), (3, 9)], heads=heads, dtype=torch.float32, launch=SMALL, splits=1))
    check(Wanted(lengths=[(1, 40)], heads=heads, dtype=torch.float32, launch=SMALL, splits=2, sinks=True))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_random_problems(seed: int) -> None:
    draw = random.Random(seed)
    group, kv_heads = draw.choice([1, 2, 3, 5, 8, 20, 33]), draw.choice([1, 2])
    lengths = []
    for _ in range(draw.randint(1, 4)):
        query_len = draw.choice([0, 1, 1, 1, 2, 15, 16, 17])
        lengths.append((query_len, query_len + draw.choice([0, 1, 15, 16, 17, 100])))
    head_size = draw.choice([64, 80, 128, 160, 192, 256])
    check(
        Wanted(
            lengths=lengths,
            heads=(group * kv_heads, kv_heads),
            head_size=head_size,
            value_size=draw.choice([head_size, head_size, 64, 128]),
            dtype=draw.choice(FLOATS),
            kv_dtype=draw.choice([None, *SCALED]),
            static=draw.choice([False, True]),
            block_size=draw.choice([16, 32]),
            window=draw.choice([None, None, 1, 10, 64]),
            soft_cap=draw.choice([0.0, 0.0, 20.0]),
            sinks=draw.choice([False, True]),
            alibi=draw.choice([False, True]),
            launch=AttentionLaunch(draw.choice([16, 32]), draw.choice([16, 32, 64]), 4, 1),
            splits=draw.choice([1, 1, 2, 5]),
            seed=seed,
        )
    )
