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

    ``key`` [N,S,G,D] and ``value`` [N,S,G,Dv] in the cache's dtype; ``value`` may be a view of the first Dv
    features of ``key``, and then they share their scales. The scaled types (int8, fp8) have ``key_scale`` and
    ``value_scale`` float32 [N,S,G]: a stored element times its scale is the value. ``static_scales``: the scales were
    calibrated and writing only divides by them; they may then be stride-0 views of one number per layer or head.
    Otherwise writing computes one per token and head.
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
    def value_is_key(self) -> bool:
        """Whether values are the first features of the keys, stored once (multi-head latent attention)."""
        return self.value.data_ptr() == self.key.data_ptr() and self.key.numel() > 0

    @property
    def block_size(self) -> int:
        """S, tokens per block."""
        return self.key.shape[1]

    @property
    def tensors(self) -> list[Tensor]:
        """What a block consists of, for copying: each tensor has the blocks as its first dimension."""
        separate = not self.value_is_key
        parts = [self.key, *([self.value] if separate else [])]
        if self.is_scaled and not self.static_scales:
            scales = (self.key_scale, self.value_scale) if separate else (self.key_scale,)
            parts += [scale for scale in scales if scale is not None]
        return parts


def is_scaled_dtype(dtype: torch.dtype) -> bool:
    """Whether a cache of this type stores elements divided by a scale."""
    return dtype.itemsize == 1


def allocate_kv_cache(
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_size: int,
    dtype: torch.dtype,
    device: torch.device | str,
    value_head_size: int | None = None,
    static_scales: tuple[Tensor, Tensor] | None = None,
) -> KVCache:
    """One layer's cache; one of int8 or fp8 with room for a scale per token and head, or with calibrated ones.

    ``static_scales``: of keys and of values, one number or [G] each. Not cleared: on the CPU no page is touched before
    a token is written there, so an unused pool costs no memory.
    """
    shape = num_blocks, block_size, num_kv_heads
    value_size = head_size if value_head_size is None else value_head_size
    on_cpu = torch.device(device).type == "cpu"
    if on_cpu:
        key = torch.empty((num_blocks, num_kv_heads, head_size, block_size), dtype=dtype).permute(0, 3, 1, 2)
        value = torch.empty((num_blocks, num_kv_heads, block_size, value_size), dtype=dtype).transpose(1, 2)
    else:
        key, value = (torch.empty((*shape, size), dtype=dtype, device=device) for size in (head_size, value_size))
    if not is_scaled_dtype(dtype):
        return KVCache(key, value)
    if static_scales is not None:
        key_scale, value_scale = (scale.to(device, torch.float32).expand(shape) for scale in static_scales)
        return KVCache(key, value, key_scale, value_scale, static_scales=True)
    if on_cpu:
        order = num_blocks, num_kv_heads, block_size
        key_scale, value_scale = (torch.empty(order).transpose(1, 2) for _ in range(2))
    else:
        key_scale, value_scale = (torch.empty(shape, device=device) for _ in range(2))
    return KVCache(key, value, key_scale, value_scale)


def kv_block_bytes(
    block_size: int,
    num_kv_heads: int,
    head_size: int,
    dtype: torch.dtype,
    value_head_size: int | None = None,
    *,
    static_scales: bool = False,
) -> int:
    """Bytes that one block takes in one layer, keys and values together, with the scales of its tokens if any."""
    elements = head_size + (head_size if value_head_size is None else value_head_size)
    scales = 2 * torch.float32.itemsize if is_scaled_dtype(dtype) and not static_scales else 0
    return block_size * num_kv_heads * (elements * dtype.itemsize + scales)
