"""One layer's KV cache, and how it lies in memory: keys and values are logically [N,S,G,D] on every device.

On a CPU keys are physically [N,G,D,S] and values [N,G,S,D]. A kernel there computes the scores of neighbouring slots in
the lanes of one vector: with the slots of a block side by side for each feature, keys load straight from the cache, and
so do a token's values with its features side by side. Kernels take any strides, so nothing else depends on this choice.
On a GPU both are [N,S,G,D].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class KVCache:
    """The cached keys and values of one layer.

    ``key`` [N,S,G,D] and ``value`` [N,S,G,Dv] in the cache's dtype; ``value`` may be a view of ``key``. The scaled
    types (int8, fp8) have ``key_scale`` and ``value_scale`` float32 [N,S,G]: a stored element times its scale is the
    value. ``static_scales``: the scales were calibrated and writing only divides by them; they may then be stride-0
    views of one number per layer or head. Otherwise writing computes one per token and head.
    """

    key: Tensor
    value: Tensor
    key_scale: Tensor | None = None
    value_scale: Tensor | None = None
    static_scales: bool = False

    @property
    def is_scaled(self) -> bool:
        """Whether elements are stored divided by a scale."""
        return self.key_scale is not None

    @property
    def block_size(self) -> int:
        """S, tokens per block."""
        return self.key.shape[1]

    @property
    def tensors(self) -> list[Tensor]:
        """What a block consists of, for copying: each tensor has the blocks as its first dimension."""
        parts = [self.key]
        if self.value.untyped_storage().data_ptr() != self.key.untyped_storage().data_ptr():
            parts.append(self.value)
        if not self.static_scales:
            parts += [scale for scale in (self.key_scale, self.value_scale) if scale is not None]
        return parts


def allocate_kv_cache(
    num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, dtype: torch.dtype, device: torch.device | str
) -> KVCache:
    """One layer's cache.

    Not cleared: on the CPU no page is touched before a token is written there, so an unused pool costs no memory.
    """
    if torch.device(device).type != "cpu":
        shape = (num_blocks, block_size, num_kv_heads, head_size)
        return KVCache(torch.empty(shape, dtype=dtype, device=device), torch.empty(shape, dtype=dtype, device=device))
    key = torch.empty((num_blocks, num_kv_heads, head_size, block_size), dtype=dtype)
    value = torch.empty((num_blocks, num_kv_heads, block_size, head_size), dtype=dtype)
    return KVCache(key.permute(0, 3, 1, 2), value.transpose(1, 2))


def kv_block_bytes(block_size: int, num_kv_heads: int, head_size: int, dtype: torch.dtype) -> int:
    """Bytes that one block takes in one layer, keys and values together."""
    return 2 * block_size * num_kv_heads * head_size * dtype.itemsize
