"""How keys and values lie in memory: both logically [N,S,G,D], keys physically [N,G,D,S] and values [N,G,S,D] on a CPU.

A CPU kernel computes the scores of neighbouring slots in the lanes of one vector: with the slots of a block side by
side for each feature, keys load straight from the cache, and so do a token's values with its features side by side.
Kernels take any strides, so nothing else depends on this choice. On a GPU both are [N,S,G,D].
"""

from __future__ import annotations

import torch
from torch import Tensor


def allocate_kv_cache(
    num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, dtype: torch.dtype, device: torch.device | str
) -> tuple[Tensor, Tensor]:
    """One layer's (key_cache, value_cache), each [N,S,G,D].

    Not cleared: on the CPU no page is touched before a token is written there, so an unused pool costs no memory.
    """
    if torch.device(device).type != "cpu":
        shape = (num_blocks, block_size, num_kv_heads, head_size)
        return torch.empty(shape, dtype=dtype, device=device), torch.empty(shape, dtype=dtype, device=device)
    key = torch.empty((num_blocks, num_kv_heads, head_size, block_size), dtype=dtype)
    value = torch.empty((num_blocks, num_kv_heads, block_size, head_size), dtype=dtype)
    return key.permute(0, 3, 1, 2), value.transpose(1, 2)


def kv_block_bytes(block_size: int, num_kv_heads: int, head_size: int, dtype: torch.dtype) -> int:
    """Bytes that one block takes in one layer, keys and values together."""
    return 2 * block_size * num_kv_heads * head_size * dtype.itemsize
