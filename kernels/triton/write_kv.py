"""Store new keys and values at their slots of the paged cache.

Cost per token: reads G (D + Dv) elements and writes as many of the cache's type, with 8 G bytes of scales for int8 and
fp8 caches; about 4 operations an element of these. Any strides; a negative slot is skipped (a padded batch). The
cache's dtype may differ from the new values'. Values that are the first features of the keys are not written twice.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ..kv_layout import KVCache
from .kv_codes import code_constants, copy_heads, scale_tensors
from .launch_table import row_launch
from .runtime import device_arch


# fmt: off
@triton.jit
def write_kv_kernel(
    key_ptr: tl.tensor, value_ptr: tl.tensor, key_cache_ptr: tl.tensor, value_cache_ptr: tl.tensor,
    key_scale_ptr: tl.tensor, value_scale_ptr: tl.tensor, slot_mapping_ptr: tl.tensor,
    num_kv_heads: tl.tensor, block_size: tl.tensor,
    key_token_stride: tl.tensor, key_head_stride: tl.tensor,
    value_token_stride: tl.tensor, value_head_stride: tl.tensor,
    kc_block_stride: tl.tensor, kc_slot_stride: tl.tensor, kc_head_stride: tl.tensor, kc_dim_stride: tl.tensor,
    vc_block_stride: tl.tensor, vc_slot_stride: tl.tensor, vc_head_stride: tl.tensor, vc_dim_stride: tl.tensor,
    ks_block_stride: tl.tensor, ks_slot_stride: tl.tensor, ks_head_stride: tl.tensor,
    vs_block_stride: tl.tensor, vs_slot_stride: tl.tensor, vs_head_stride: tl.tensor,
    HEAD_SIZE: tl.constexpr, HEAD_PAD: tl.constexpr, VALUE_SIZE: tl.constexpr, VALUE_PAD: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, VALUE_IS_KEY: tl.constexpr, SCALING: tl.constexpr, LIMIT: tl.constexpr,
) -> None:
    # fmt: on
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token)
    if slot < 0:
        return
    block = slot // block_size
    offset = slot % block_size
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    mask = heads < num_kv_heads
    rows = key_ptr + token * key_token_stride + heads * key_head_stride
    places = key_cache_ptr + block * kc_block_stride + offset * kc_slot_stride + heads * kc_head_stride
    scales = key_scale_ptr + block * ks_block_stride + offset * ks_slot_stride + heads * ks_head_stride
    copy_heads(rows, places, kc_dim_stride, scales, mask, HEAD_SIZE, HEAD_PAD, SCALING, LIMIT)
    if not VALUE_IS_KEY:
        rows = value_ptr + token * value_token_stride + heads * value_head_stride
        places = value_cache_ptr + block * vc_block_stride + offset * vc_slot_stride + heads * vc_head_stride
        scales = value_scale_ptr + block * vs_block_stride + offset * vs_slot_stride + heads * vs_head_stride
        copy_heads(rows, places, vc_dim_stride, scales, mask, VALUE_SIZE, VALUE_PAD, SCALING, LIMIT)


def constants(head_size: int, value_size: int) -> dict[str, Any]:
    """The compile-time arguments that follow from the sizes of the heads."""
    head_pad, value_pad = triton.next_power_of_2(head_size), triton.next_power_of_2(value_size)
    return {
        "HEAD_SIZE": head_size,
        "HEAD_PAD": head_pad,
        "VALUE_SIZE": value_size,
        "VALUE_PAD": value_pad,
        "BLOCK_HEADS": max(1, 1024 // max(head_pad, value_pad)),
    }


def write_kv(key: Tensor, value: Tensor, cache: KVCache, slot_mapping: Tensor) -> None:
    """``reference.write_kv``: key [T,G,D] and value [T,G,Dv] to slots ``block * S + offset`` (int64 [T])."""
    key, value = (part if part.stride(-1) == 1 else part.contiguous() for part in (key, value))
    num_tokens, num_kv_heads, head_size = key.shape
    if num_tokens == 0:
        return
    values = constants(head_size, value.shape[2])
    key_scale, value_scale, scale_strides = scale_tensors(cache)
    write_kv_kernel[(num_tokens, triton.cdiv(num_kv_heads, values["BLOCK_HEADS"]))](
        key,
        value,
        cache.key,
        cache.value,
        key_scale,
        value_scale,
        slot_mapping,
        num_kv_heads,
        cache.block_size,
        *key.stride()[:2],
        *value.stride()[:2],
        *cache.key.stride(),
        *cache.value.stride(),
        *scale_strides,
        **values,
        **code_constants(cache.key.dtype, static=cache.static_scales),
        VALUE_IS_KEY=cache.value_is_key,
        num_warps=row_launch(device_arch(key.device), 1024).num_warps,
    )
