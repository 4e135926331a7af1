"""Fused operations equal their parts bit for bit, and models use them only where they exist."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from attention_cases import make_case
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
