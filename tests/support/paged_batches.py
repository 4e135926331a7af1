"""Batches for paged attention over shuffled blocks, of any lengths."""

from __future__ import annotations

import torch
from twofold.kernels.attention_batch import AttentionBatch
from twofold.kernels.triton.launch_table import AttentionLaunch

MIXED = [(1, 1), (5, 5), (1, 16), (3, 40), (17, 33), (1, 70)]
SMALL = AttentionLaunch(16, 16, 4, 1)


def make_batch(lengths: list[tuple[int, int]], block_size: int, seed: int = 0) -> tuple[AttentionBatch, int]:
    """(batch, number of blocks) for (query length, context length) per request, over shuffled blocks."""
    generator = torch.Generator().manual_seed(seed)
    needed = [-(-seq_len // block_size) for _, seq_len in lengths]
    num_blocks = sum(needed) + 2
    order = (torch.randperm(num_blocks - 1, generator=generator) + 1).int()
    table = torch.zeros(len(lengths), max([*needed, 1]), dtype=torch.int32)
    taken = 0
    for row, count in enumerate(needed):
        table[row, :count] = order[taken : taken + count]
        taken += count
    query_lens = [query_len for query_len, _ in lengths]
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    batch = AttentionBatch(
        query_start_loc=starts,
        seq_lens=torch.tensor([seq_len for _, seq_len in lengths], dtype=torch.int32),
        block_table=table,
        slot_mapping=torch.zeros(sum(query_lens), dtype=torch.int64),
        query_lens_host=tuple(query_lens),
        seq_lens_host=tuple(seq_len for _, seq_len in lengths),
    )
    return batch, num_blocks
