"""How keys and values lie in memory: logically [N,S,G,D], physically [N,G,S,D].

One head's keys of one block are then contiguous, S*D elements in a row, which is what an attention kernel reads for one
(request, KV head). Kernels take any strides, so nothing else depends on this choice.
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
    shape = (num_blocks, num_kv_heads, block_size, head_size)
    key, value = (torch.empty(shape, dtype=dtype, device=device).transpose(1, 2) for _ in range(2))
    return key, value


def kv_block_bytes(block_size: int, num_kv_heads: int, head_size: int, dtype: torch.dtype) -> int:
    """Bytes that one block takes in one layer, keys and values together."""
    return 2 * block_size * num_kv_heads * head_size * dtype.itemsize
