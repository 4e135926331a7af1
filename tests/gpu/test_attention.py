"""On a GPU: attention over every cache type and with every extra, and the fused write, against torch in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU"),
]

LENGTHS = [(1, 1), (1, 700), (33, 64), (5, 5), (1, 16)]
BLOCK_SIZE = 16


def cache_types() -> list[torch.dtype]:
    from twofold.platforms import select_platform
    from twofold.platforms.fp8 import fp8_dtype
    from twofold.platforms.spec import Fp8Kind

    kind = select_platform("auto").spec.fp8
    return [torch.bfloat16, torch.int8, *([] if kind is Fp8Kind.NONE else [fp8_dtype(kind)])]


def make_batch() -> Any:
    from twofold.kernels.attention_batch import AttentionBatch

    pages = [-(-length // BLOCK_SIZE) for _, length in LENGTHS]
    table = torch.zeros(len(LENGTHS), max(pages), dtype=torch.int32)
    order = torch.randperm(sum(pages), generator=torch.Generator().manual_seed(0)).int()
    for row, part in enumerate(order.split(pages)):
        table[row, : len(part)] = part
    query_lens, seq_lens = zip(*LENGTHS, strict=True)
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    return AttentionBatch(
        query_start_loc=starts.cuda(),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32).cuda(),
        block_table=table.cuda(),
        slot_mapping=torch.arange(sum(pages) * BLOCK_SIZE).cuda(),
        query_lens_host=query_lens,
        seq_lens_host=seq_lens,
    )


@pytest.mark.parametrize(
    ("heads", "head_size", "value_size", "extras"),
    [
        ((8, 2), 64, 64, {"sliding_window": 100, "sinks": True}),
        ((8, 2), 128, 128, {"alibi": True}),
        ((40, 1), 128, 128, {"soft_cap": 20.0}),
        ((4, 4), 192, 128, {}),
        ((128, 1), 576, 512, {}),
    ],
)
def test_attention_is_that_of_float64(
    heads: tuple[int, int], head_size: int, value_size: int, extras: dict[str, Any]
) -> None:
    from twofold.kernels import reference
    from twofold.kernels.kv_layout import KVCache, allocate_kv_cache
    from twofold.kernels.reference.kv_cache import dequantize_kv
    from twofold.kernels.triton.paged_attention import paged_attention
    from twofold.kernels.triton.write_kv import write_kv

    torch.manual_seed(0)
    batch, num_heads = make_batch(), heads[0]
    num_blocks = len(batch.slot_mapping) // BLOCK_SIZE
    named = {name: extras[name] for name in ("sliding_window", "soft_cap") if name in extras}
    if extras.get("sinks"):
        named["sinks"] = torch.randn(num_heads).cuda()
    if extras.get("alibi"):
        named["alibi_slopes"] = 2.0 ** -torch.arange(1.0, num_heads + 1).cuda()
    for dtype in cache_types():
        cache = allocate_kv_cache(num_blocks, BLOCK_SIZE, heads[1], head_size, dtype, "cuda", value_size)
        if head_size == 576:
            cache = KVCache(cache.key, cache.key[..., :512], cache.key_scale, cache.key_scale)
        key, value = (
            torch.randn(len(batch.slot_mapping), heads[1], size).cuda().bfloat16() for size in (head_size, value_size)
        )
        write_kv(key, key[..., :512] if head_size == 576 else value, cache, batch.slot_mapping)
        scales = cache.key_scale, cache.value_scale
        wide = [None if scale is None else scale.double() for scale in scales]
        plain = KVCache(
            *(dequantize_kv(part.double(), scale) for part, scale in zip((cache.key, cache.value), wide, strict=True))
        )
        query = torch.randn(sum(batch.query_lens_host), num_heads, head_size).cuda().bfloat16()
        expected = reference.paged_attention(query.double(), plain, batch, head_size**-0.5, **named)
        actual = paged_attention(query, cache, batch, head_size**-0.5, **named)
        limit = 2.0**-7 * (expected.abs() + 1.0)
        assert ((actual.double() - expected).abs() <= limit).all(), str(dtype)


def test_the_fused_write_is_its_parts() -> None:
    from twofold.kernels import reference
    from twofold.kernels.kv_layout import allocate_kv_cache
    from twofold.kernels.reference.kv_cache import dequantize_kv
    from twofold.kernels.triton.rope_write_kv import rope_write_kv

    torch.manual_seed(0)
    q, k, v = (torch.randn(7, heads, 128).cuda().bfloat16() for heads in (8, 2, 2))
    norms = [torch.randn(128).cuda().bfloat16() for _ in range(2)]
    angles = torch.randn(50, 64).cuda()
    table, positions = torch.cat((angles.cos(), angles.sin()), -1), torch.randint(0, 50, (7,)).cuda()
    slots = torch.tensor([3, -1, 40, 0, 17, 5, 47]).cuda()
    for dtype in cache_types():
        caches = [allocate_kv_cache(3, BLOCK_SIZE, 2, 128, dtype, "cuda") for _ in range(2)]
        for part in (*caches[0].tensors, *caches[1].tensors):
            part.zero_()
        arguments = (k, v, table, positions, False)
        wanted = reference.rope_write_kv(q.clone(), *arguments, caches[1], slots, *norms, 1e-5, 1.0)
        rotated = rope_write_kv(q.clone(), *arguments, caches[0], slots, *norms, 1e-5, 1.0)
        torch.testing.assert_close(rotated, wanted, rtol=2.0**-7, atol=1e-2)
        for got, right in zip(caches[0].tensors[:1], caches[1].tensors[:1], strict=True):
            scales = caches[0].key_scale, caches[1].key_scale
            values = [dequantize_kv(part, scale) for part, scale in zip((got, right), scales, strict=True)]
            torch.testing.assert_close(*values, rtol=2.0**-3, atol=0.1)
