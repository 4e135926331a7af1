"""Contexts cut into parts, and their combination: 4 (Dv + 2) bytes and 2 Dv operations per query row and part."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..attention_batch import AttentionBatch

MAX_SPLITS = 64
MIN_SPLIT_TOKENS = 256
REDUCE_DIMS = 64


@triton.jit
def reduce_splits_kernel(
    partial_ptr: tl.tensor,
    stats_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_splits: tl.tensor,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLITS_PAD: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    splits = tl.arange(0, SPLITS_PAD)
    dims = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    split_rows = row * num_splits + splits
    maxima = tl.load(stats_ptr + split_rows * 2, mask=splits < num_splits, other=float("-inf"))
    denominators = tl.load(stats_ptr + split_rows * 2 + 1, mask=splits < num_splits, other=0.0)
    # Every row sees at least its own token, so one maximum is finite.
    factors = tl.exp2(maxima - tl.max(maxima, axis=0))
    mask = (factors > 0.0)[:, None] & (dims < HEAD_SIZE)[None, :]
    parts = tl.load(partial_ptr + split_rows[:, None] * HEAD_SIZE + dims[None, :], mask=mask, other=0.0)
    out = tl.sum(parts * factors[:, None], axis=0) / tl.sum(denominators * factors, axis=0)
    tl.store(out_ptr + row * HEAD_SIZE + dims, out.to(out_ptr.dtype.element_ty), mask=dims < HEAD_SIZE)


def num_splits(batch: AttentionBatch, programs_per_request: int, sliding_window: int | None, cores: int) -> int:
    """Parts to cut each context into: enough to fill the cores twice, none below ``MIN_SPLIT_TOKENS`` tokens."""
    programs = batch.num_requests * programs_per_request
    if programs == 0 or programs >= cores:
        return 1
    seen = batch.max_seq_len if sliding_window is None else min(batch.max_seq_len, sliding_window)
    return max(1, min(triton.cdiv(2 * cores, programs), seen // MIN_SPLIT_TOKENS, MAX_SPLITS))


def split_buffers(out: Tensor, splits: int) -> tuple[Tensor, Tensor]:
    """float32 sums [T,H,splits,Dv], (maximum, denominator) [T,H,splits,2]; unused (and so ``out``) without splits."""
    if splits == 1:
        return out, out
    num_tokens, num_heads, head_size = out.shape
    shape = (num_tokens, num_heads, splits)
    partial = torch.empty((*shape, head_size), dtype=torch.float32, device=out.device)
    return partial, torch.empty((*shape, 2), dtype=torch.float32, device=out.device)


def reduce_constants(head_size: int, splits: int) -> dict[str, Any]:
    """The compile-time arguments of the reduction over splits."""
    return {"HEAD_SIZE": head_size, "BLOCK_D": REDUCE_DIMS, "SPLITS_PAD": triton.next_power_of_2(splits)}


def reduce_splits(partial: Tensor, stats: Tensor, out: Tensor, splits: int) -> None:
    """Combine the splits' sums into ``out`` [T,H,Dv]."""
    num_tokens, num_heads, head_size = out.shape
    grid = (num_tokens * num_heads, triton.cdiv(head_size, REDUCE_DIMS))
    reduce_splits_kernel[grid](partial, stats, out, splits, **reduce_constants(head_size, splits), num_warps=4)
