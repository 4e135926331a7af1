"""The rows of a step sorted by expert and cut into blocks of ``block_m`` rows of one expert each.

    expert ids int32 [T,k] -> order int32 [Tk], blocks int32 [3, B]: expert, first place in ``order``, rows

Everything stays on the device, so that a graph can capture it: B is the most blocks that any choice of experts can
give, and blocks beyond those in use have expert -1. Choices of no expert (-1) form blocks of an expert E. Within an
expert the choices keep their order; nothing depends on timing.

Cost: some 4 bytes, and 128 operations, per choice and per (chunk, expert); one launch up to ``CHUNK`` choices or three.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch_table import has_wide_waves
from .runtime import device_arch

CHUNK = 128
PREFIX_CHUNKS = 32
PREFIX_BINS = 32


@dataclass(frozen=True, slots=True, eq=False)
class Alignment:
    """``order`` and ``blocks`` as above."""

    order: Tensor
    blocks: Tensor


@triton.jit
def expert_bins(
    ids_ptr: tl.tensor, index: tl.tensor, num_choices: tl.tensor, num_experts: tl.tensor, BINS: tl.constexpr
) -> tl.tensor:
    """The expert of each choice; E for none, ``BINS - 1`` beyond the last choice."""
    ids = tl.load(ids_ptr + index, mask=index < num_choices, other=-1)
    ids = tl.where((ids < 0) | (ids >= num_experts), num_experts, ids)
    return tl.where(index < num_choices, ids, BINS - 1)


@triton.jit(do_not_specialize=["num_choices"])
def count_experts_kernel(
    ids_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    num_choices: tl.tensor,
    num_experts: tl.tensor,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    chunk = tl.program_id(0)
    bins = expert_bins(ids_ptr, chunk * CHUNK + tl.arange(0, CHUNK), num_choices, num_experts, BINS)
    tl.store(counts_ptr + chunk * BINS + tl.arange(0, BINS), tl.histogram(bins, BINS))


@triton.jit(do_not_specialize=["num_chunks"])
def sum_chunks_kernel(
    counts_ptr: tl.tensor,
    totals_ptr: tl.tensor,
    num_chunks: tl.tensor,
    BINS: tl.constexpr,
    TILE_BINS: tl.constexpr,
    TILE_CHUNKS: tl.constexpr,
) -> None:
    """counts [chunks, BINS] become the sums over the chunks before; totals [BINS] over all."""
    bins = tl.program_id(0) * TILE_BINS + tl.arange(0, TILE_BINS)
    total = tl.zeros([TILE_BINS], dtype=tl.int32)
    for start in range(0, num_chunks, TILE_CHUNKS):
        chunks = start + tl.arange(0, TILE_CHUNKS)
        at = counts_ptr + chunks[:, None] * BINS + bins[None, :]
        counts = tl.load(at, mask=(chunks < num_chunks)[:, None], other=0)
        tl.store(at, total[None, :] + tl.cumsum(counts, 0) - counts, mask=(chunks < num_chunks)[:, None])
        total += tl.sum(counts, 0)
    tl.store(totals_ptr + bins, total)


@triton.jit(do_not_specialize=["num_choices", "num_blocks"])
def place_choices_kernel(
    ids_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    totals_ptr: tl.tensor,
    order_ptr: tl.tensor,
    blocks_ptr: tl.tensor,
    num_choices: tl.tensor,
    num_experts: tl.tensor,
    num_blocks: tl.tensor,
    SINGLE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    chunk, step = tl.program_id(0), tl.num_programs(0)
    lane, experts = tl.arange(0, CHUNK), tl.arange(0, BINS)
    index = chunk * CHUNK + lane
    bins = expert_bins(ids_ptr, index, num_choices, num_experts, BINS)
    if SINGLE:
        totals = tl.histogram(bins, BINS)
    else:
        totals = tl.load(totals_ptr + experts)
    totals = tl.where(experts <= num_experts, totals, 0)
    firsts = tl.cumsum(totals, 0) - totals
    before = firsts
    if not SINGLE:
        before += tl.load(counts_ptr + chunk * BINS + experts)
    same = (bins[:, None] == bins[None, :]) & (lane[None, :] < lane[:, None])
    place = tl.gather(before, bins, 0) + tl.sum(same.to(tl.int32), 1)
    tl.store(order_ptr + place, index, mask=index < num_choices)
    # The j-th blocks of all experts at once; the programs take turns at j.
    used = (totals + BLOCK_M - 1) // BLOCK_M
    ends = tl.cumsum(used, 0)
    for j in range(chunk, tl.max(used, 0), step):
        at = blocks_ptr + ends - used + j
        tl.store(at, experts, mask=j < used)
        tl.store(at + num_blocks, firsts + j * BLOCK_M, mask=j < used)
        tl.store(at + 2 * num_blocks, tl.minimum(totals - j * BLOCK_M, BLOCK_M), mask=j < used)
    for start in range(tl.sum(used, 0) + chunk * CHUNK, num_blocks, step * CHUNK):
        tl.store(blocks_ptr + start + lane, -1, mask=start + lane < num_blocks)


def num_bins(num_experts: int) -> int:
    """Experts, no expert, and what is beyond the last choice."""
    return max(16, int(triton.next_power_of_2(num_experts + 2)))


def max_blocks(num_choices: int, num_experts: int, block_m: int) -> int:
    """Most blocks that any choice of experts gives: one row for each of them, and the rest for one."""
    used = min(num_choices, num_experts + 1)
    return used + (num_choices - used) // block_m


def place_constants(num_experts: int, block_m: int, single: bool) -> dict[str, Any]:
    """The compile-time arguments of ``place_choices_kernel``."""
    return {"SINGLE": single, "BLOCK_M": block_m, "BINS": num_bins(num_experts), "CHUNK": CHUNK}


def sum_constants(num_experts: int) -> dict[str, Any]:
    """The compile-time arguments of ``sum_chunks_kernel``."""
    bins = num_bins(num_experts)
    return {"BINS": bins, "TILE_BINS": min(bins, PREFIX_BINS), "TILE_CHUNKS": PREFIX_CHUNKS}


def place_warps(arch: str) -> int:
    """A program compares CHUNK choices with each other: 64 to a lane."""
    return 4 if has_wide_waves(arch) else 8


def align(expert_ids: Tensor, num_experts: int, block_m: int) -> Alignment:
    """Sort the choices of ``expert_ids`` int32 [T,k] by expert."""
    ids = expert_ids.reshape(-1)
    choices, device = ids.numel(), ids.device
    bins, chunks, blocks = num_bins(num_experts), triton.cdiv(choices, CHUNK), max_blocks(choices, num_experts, block_m)
    order = torch.empty(choices, dtype=torch.int32, device=device)
    table = torch.empty((3, blocks), dtype=torch.int32, device=device)
    counts = totals = order
    if chunks > 1:
        counts = torch.empty((chunks, bins), dtype=torch.int32, device=device)
        totals = torch.empty(bins, dtype=torch.int32, device=device)
        count_experts_kernel[(chunks,)](ids, counts, choices, num_experts, BINS=bins, CHUNK=CHUNK, num_warps=1)
        values = sum_constants(num_experts)
        sum_chunks_kernel[(bins // values["TILE_BINS"],)](counts, totals, chunks, **values, num_warps=4)
    place_choices_kernel[(chunks,)](
        ids,
        counts,
        totals,
        order,
        table,
        choices,
        num_experts,
        blocks,
        **place_constants(num_experts, block_m, chunks == 1),
        num_warps=place_warps(device_arch(device)),
    )
    return Alignment(order, table)
