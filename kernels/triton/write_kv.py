"""Store new keys and values at their slots of the paged cache.

Cost per token: reads and writes 2 G D elements. Any strides on either side; a negative slot is skipped, so that a
padded batch can be written. The cache's dtype may differ from the new values'.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ..kv_layout import KVCache
from .launch_table import row_launch
from .runtime import device_arch


@triton.jit
def write_kv_kernel(
    key_ptr: tl.tensor,
    value_ptr: tl.tensor,
    key_cache_ptr: tl.tensor,
    value_cache_ptr: tl.tensor,
    slot_mapping_ptr: tl.tensor,
    num_kv_heads: tl.tensor,
    block_size: tl.tensor,
    key_token_stride: tl.tensor,
    key_head_stride: tl.tensor,
    value_token_stride: tl.tensor,
    value_head_stride: tl.tensor,
    kc_block_stride: tl.tensor,
    kc_slot_stride: tl.tensor,
    kc_head_stride: tl.tensor,
    kc_dim_stride: tl.tensor,
    vc_block_stride: tl.tensor,
    vc_slot_stride: tl.tensor,
    vc_head_stride: tl.tensor,
    vc_dim_stride: tl.tensor,
    HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token)
    if slot < 0:
        return
    block = slot // block_size
    offset = slot % block_size
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
    dims = tl.arange(0, HEAD_PAD)[None, :]
    mask = (heads < num_kv_heads) & (dims < HEAD_SIZE)
    key = tl.load(key_ptr + token * key_token_stride + heads * key_head_stride + dims, mask=mask)
    key_cache = key_cache_ptr + block * kc_block_stride + offset * kc_slot_stride
    tl.store(
        key_cache + heads * kc_head_stride + dims * kc_dim_stride, key.to(key_cache_ptr.dtype.element_ty), mask=mask
    )
    value = tl.load(value_ptr + token * value_token_stride + heads * value_head_stride + dims, mask=mask)
    value_cache = value_cache_ptr + block * vc_block_stride + offset * vc_slot_stride
    value = value.to(value_cache_ptr.dtype.element_ty)
    tl.store(value_cache + heads * vc_head_stride + dims * vc_dim_stride, value, mask=mask)


def constants(head_size: int) -> dict[str, Any]:
    """The compile-time arguments."""
    head_pad = triton.next_power_of_2(head_size)
    return {"HEAD_SIZE": head_size, "HEAD_PAD": head_pad, "BLOCK_HEADS": max(1, 1024 // head_pad)}


def write_kv(key: Tensor, value: Tensor, cache: KVCache, slot_mapping: Tensor) -> None:
    """Store key and value [T,G,D] at slots ``block * S + offset`` (int64 [T]) of the cache."""
    key, value = (part if part.stride(-1) == 1 else part.contiguous() for part in (key, value))
    num_tokens, num_kv_heads, head_size = key.shape
    if num_tokens == 0:
        return
    values = constants(head_size)
    write_kv_kernel[(num_tokens, triton.cdiv(num_kv_heads, values["BLOCK_HEADS"]))](
        key,
        value,
        cache.key,
        cache.value,
        slot_mapping,
        num_kv_heads,
        cache.block_size,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        *cache.key.stride(),
        *cache.value.stride(),
        **values,
        num_warps=row_launch(device_arch(key.device), 1024).num_warps,
    )
