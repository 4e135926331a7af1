"""Launch settings of the LoRA kernels: tiles by rank class, all of one height, so that results stay the same."""

from __future__ import annotations

from dataclasses import dataclass

# Rows of one adapter in a tile, however many there are: a row's sums must not depend on its company.
BLOCK_M = 16
# Input features per part of the shrinking product; parts are added in order, whoever adds them.
SPLIT_K = 512


@dataclass(frozen=True, slots=True)
class LoraLaunch:
    """``block_rank`` ranks by ``block_k`` input features (shrink) or by ``block_n`` output features (expand)."""

    block_rank: int
    block_k: int
    block_n: int
    num_warps: int
    num_stages: int


def lora_row(arch: str, rank: int, element_size: int) -> LoraLaunch:
    """The row for adapters of at most ``rank``; the same for every architecture so far."""
    block_rank = 16 if rank <= 16 else 32
    if element_size == 4:
        return LoraLaunch(block_rank, 32, 32, 4, 1)
    return LoraLaunch(block_rank, 128, 64, 4, 2)
