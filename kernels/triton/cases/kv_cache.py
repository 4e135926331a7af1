"""Writing keys and values into the cache, alone and behind the rotary embedding."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ....platforms.arch_spec import spec_of_arch
from ....platforms.fp8 import fp8_dtype
from ....platforms.spec import Fp8Kind
from .. import rope_write_kv, write_kv
from ..kv_codes import code_constants
from ..launch_table import row_launch
from .case import CODE_NAMES, DTYPES, TYPE_NAMES, Case


def cases(arch: str) -> Iterator[Case]:
    """Head sizes at, under and over a power of two in every dtype, scaled caches, latent attention's keys."""
    kind = spec_of_arch(arch).fp8
    scaled = [torch.int8, *([] if kind is Fp8Kind.NONE else [fp8_dtype(kind)])]
    for dtype in DTYPES:
        for head_size in (64, 80, 256):
            yield _write_case(arch, dtype, dtype, head_size, head_size)
        for kv_dtype in (dtype, *scaled):
            for with_norm in (False, True) if dtype is torch.bfloat16 else (True,):
                yield _rope_case(arch, dtype, kv_dtype, 128, 128, with_norm=with_norm)
    for kv_dtype in scaled:
        yield _write_case(arch, torch.bfloat16, kv_dtype, 128, 128)
        yield _write_case(arch, torch.float32, kv_dtype, 128, 128)
        yield _write_case(arch, torch.bfloat16, kv_dtype, 576, 512)
        yield _rope_case(arch, torch.bfloat16, kv_dtype, 80, 32, with_norm=True)
    yield _write_case(arch, torch.bfloat16, torch.bfloat16, 576, 512)


def _types(dtype: torch.dtype, kv_dtype: torch.dtype) -> dict[str, str]:
    cache, scale = f"*{CODE_NAMES[kv_dtype]}", "*fp32" if kv_dtype.itemsize == 1 else f"*{CODE_NAMES[kv_dtype]}"
    types = {"key_cache_ptr": cache, "value_cache_ptr": cache, "key_scale_ptr": scale, "value_scale_ptr": scale}
    return {**types, "slot_mapping_ptr": "*i64"}


def _ones(kv_dtype: torch.dtype) -> dict[str, int]:
    scales = ("ks_slot_stride", "vs_slot_stride") if kv_dtype.itemsize == 1 else ()
    return dict.fromkeys(("kc_dim_stride", "vc_dim_stride", *scales), 1)


def _write_case(arch: str, dtype: torch.dtype, kv_dtype: torch.dtype, head_size: int, value_size: int) -> Case:
    name = TYPE_NAMES[dtype]
    size = f"D={head_size}" + (f"/{value_size}" if value_size != head_size else "")
    return Case(
        op="write_kv",
        variant=f"{size} {name}" + (f", cache {CODE_NAMES[kv_dtype]}" if kv_dtype is not dtype else ""),
        kernel=write_kv.write_kv_kernel,
        types={**_types(dtype, kv_dtype), "key_ptr": f"*{name}", "value_ptr": f"*{name}"},
        constants={
            **write_kv.constants(head_size, value_size),
            **code_constants(kv_dtype),
            **_ones(kv_dtype),
            "VALUE_IS_KEY": value_size != head_size,
        },
        options={"num_warps": row_launch(arch, 1024).num_warps},
        ones=("num_kv_heads", "block_size"),
        in_subset=dtype is torch.bfloat16 and head_size in (80, 128),
    )


def _rope_case(
    arch: str, dtype: torch.dtype, kv_dtype: torch.dtype, head_size: int, rotary: int, *, with_norm: bool
) -> Case:
    name = TYPE_NAMES[dtype]
    cache = f", cache {CODE_NAMES[kv_dtype]}" if kv_dtype is not dtype else ""
    pointers = {f"{part}_ptr": f"*{name}" for part in ("q", "k", "v", "q_norm", "k_norm")}
    return Case(
        op="rope_write_kv",
        variant=f"D={head_size} R={rotary} {name}{cache}{' norm' if with_norm else ''}",
        kernel=rope_write_kv.rope_write_kv_kernel,
        types={
            **_types(dtype, kv_dtype),
            **pointers,
            "cos_sin_ptr": "*fp32",
            "positions_ptr": "*i64",
            "eps": "fp32",
            "norm_offset": "fp32",
        },
        constants={
            **rope_write_kv.constants(rotary, head_size, head_size, False),
            **code_constants(kv_dtype),
            **_ones(kv_dtype),
            "HAS_NORM": with_norm,
        },
        options={"num_warps": row_launch(arch, 1).num_warps},
        ones=("num_heads", "num_kv_heads", "block_size"),
        in_subset=dtype is torch.bfloat16 and rotary == 128,
    )
