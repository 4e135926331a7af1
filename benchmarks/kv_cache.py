"""Attention of a decode step over caches of each type on the CPU, in one run: ``python benchmarks/kv_cache.py``.

The types take turns within each round, so that a busy moment strikes all of them; the table has the best round of each
and its ratio to float32.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from twofold.kernels.attention_batch import AttentionBatch
from twofold.kernels.cpu.attention import paged_attention, write_kv
from twofold.kernels.kv_layout import KVCache, allocate_kv_cache, kv_block_bytes
from twofold.platforms import cpu_threads

TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8, "fp8": torch.float8_e4m3fn}
BLOCK_SIZE = 16


def main() -> None:
    """Print one row per type."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--heads", type=int, default=9)
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--head-size", type=int, default=64)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--requests", type=int, default=1)
    parser.add_argument("--layers", type=int, default=30, help="caches that are read in turn")
    parser.add_argument("--query", type=int, default=1, help="new tokens per request")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    cpu_threads.set_num_threads(args.threads)
    runs = {name: step_of(dtype, args) for name, dtype in TYPES.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(args.rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            times[name].append((time.perf_counter() - start) / args.layers)
    print(f"{args.heads}/{args.kv_heads} heads of {args.head_size}, {args.requests} x {args.context} tokens, "
          f"{args.query} new each, {args.threads} threads")  # fmt: skip
    for name, dtype in TYPES.items():
        best = min(times[name])
        size = args.requests * args.context * kv_block_bytes(1, args.kv_heads, args.head_size, dtype)
        print(f"{name:<8} {best * 1e6:9.0f} us  {size / best / 1e9:6.1f} GB/s  {min(times['float32']) / best:5.2f}x")


def step_of(dtype: torch.dtype, args: argparse.Namespace) -> Callable[[], None]:
    """A function that attends once in each layer."""
    blocks = -(-args.context // BLOCK_SIZE)
    table = torch.randperm(args.requests * blocks).view(args.requests, blocks)
    positions = torch.arange(args.context)
    slots = (table[:, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE).flatten()
    caches = [filled(dtype, args, slots) for _ in range(args.layers)]
    batch = AttentionBatch(
        query_start_loc=torch.arange(0, args.requests * args.query + 1, args.query, dtype=torch.int32),
        seq_lens=torch.full((args.requests,), args.context, dtype=torch.int32),
        block_table=table.int(),
        slot_mapping=slots[:0],
        query_lens_host=(args.query,) * args.requests,
        seq_lens_host=(args.context,) * args.requests,
    )
    query = torch.randn(args.requests * args.query, args.heads, args.head_size)

    def run() -> None:
        for cache in caches:
            paged_attention(query, cache, batch, args.head_size**-0.5)

    return run


def filled(dtype: torch.dtype, args: argparse.Namespace, slots: torch.Tensor) -> KVCache:
    """A cache with random keys and values at all slots."""
    cache = allocate_kv_cache(len(slots) // BLOCK_SIZE, BLOCK_SIZE, args.kv_heads, args.head_size, dtype, "cpu")
    key, value = torch.randn(2, len(slots), args.kv_heads, args.head_size)
    write_kv(key, value, cache, slots)
    return cache


if __name__ == "__main__":
    main()
