"""Paged attention and the reduction over splits."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ....platforms.arch_spec import spec_of_arch
from ....platforms.fp8 import fp8_dtype
from ....platforms.spec import Fp8Kind
from .. import attention_splits, paged_attention
from ..launch_attention import LATENT_SIZES, attention_row
from ..launch_table import AttentionLaunch, Refused
from .case import CODE_NAMES, DTYPES, TYPE_NAMES, Case

HEAD_SIZES = (64, 80, 128, 256)
GROUP = 4
LATENT_GROUP = 128


@dataclass(frozen=True, slots=True)
class _Shape:
    """One kind of problem; ``group`` query heads share a KV head."""

    phase: str
    head_size: int
    value_size: int
    group: int = GROUP


def cases(arch: str) -> Iterator[Case]:
    """Every launch row and dtype, the extras, caches of every dtype, latent attention, and the reduction."""
    for dtype, phase, head_size in itertools.product(DTYPES, ("decode", "prefill"), HEAD_SIZES):
        shape = _Shape(phase, head_size, head_size)
        if head_size != 80 or dtype is torch.bfloat16:
            subset = dtype is torch.bfloat16 and head_size == 64
            yield _case(arch, dtype, shape, in_subset=subset)
        if head_size in (128, 256) and dtype is not torch.float16:
            subset = dtype is torch.bfloat16 and head_size == 128
            yield _case(arch, dtype, shape, extras="window, cap", in_subset=subset)
        if head_size in (64, 128) and dtype is torch.bfloat16:
            yield _case(arch, dtype, shape, extras="window, sinks, ALiBi")
    yield from _cache_cases(arch)
    yield from _latent_cases(arch)
    for dtype, value_size in itertools.product(DTYPES, (128, 512)):
        yield Case(
            op="reduce_splits",
            variant=f"D={value_size} {TYPE_NAMES[dtype]}",
            kernel=attention_splits.reduce_splits_kernel,
            types={"partial_ptr": "*fp32", "stats_ptr": "*fp32", "out_ptr": f"*{TYPE_NAMES[dtype]}"},
            constants=attention_splits.reduce_constants(value_size, attention_splits.MAX_SPLITS),
            options={"num_warps": 4},
            in_subset=dtype is torch.bfloat16 and value_size == 128,
        )


def _cache_cases(arch: str) -> Iterator[Case]:
    """Caches of another dtype than the query's; fp8 in the kind that the architecture has."""
    for kv_dtype in (torch.float16, torch.float32):
        yield _case(arch, torch.bfloat16, _Shape("decode", 128, 128), kv_dtype=kv_dtype)
    kind = spec_of_arch(arch).fp8
    for phase, head_size in itertools.product(("decode", "prefill"), (64, 128, 256)):
        shape = _Shape(phase, head_size, head_size)
        subset = head_size == 128
        yield _case(arch, torch.bfloat16, shape, kv_dtype=torch.int8, in_subset=subset)
        if head_size == 128:
            yield _case(arch, torch.float16, shape, kv_dtype=torch.int8)
            yield _case(arch, torch.bfloat16, shape, kv_dtype=torch.int8, extras="window, sinks, ALiBi")
        yield _case(arch, torch.float32, shape, kv_dtype=torch.int8)
        if kind is Fp8Kind.NONE:
            variant = f"{phase} D={head_size} bf16, cache fp8"
            yield Case(op="paged_attention", variant=variant, refused=f"{arch} has no 8-bit float")
        else:
            yield _case(arch, torch.bfloat16, shape, kv_dtype=fp8_dtype(kind), in_subset=subset)


def _latent_cases(arch: str) -> Iterator[Case]:
    """Multi-head latent attention: absorbed, with one KV head, and not, with values smaller than keys."""
    kind = spec_of_arch(arch).fp8
    eight_bit = [torch.int8, *([] if kind is Fp8Kind.NONE else [fp8_dtype(kind)])]
    for phase in ("decode", "prefill"):
        shape = _Shape(phase, *LATENT_SIZES, LATENT_GROUP)
        subset = phase == "decode"
        yield _case(arch, torch.bfloat16, shape, in_subset=subset)
        yield _case(arch, torch.float16, shape, in_subset=False)
        for kv_dtype in eight_bit:
            yield _case(arch, torch.bfloat16, shape, kv_dtype=kv_dtype)
        yield _case(arch, torch.bfloat16, _Shape(phase, 192, 128, 1))


def _case(
    arch: str,
    dtype: torch.dtype,
    shape: _Shape,
    *,
    kv_dtype: torch.dtype | None = None,
    extras: str = "",
    in_subset: bool = False,
) -> Case:
    """``extras``: what else the kernel does; for decode then also a single token per request with split contexts."""
    name, cache = TYPE_NAMES[dtype], CODE_NAMES[kv_dtype or dtype]
    scaled = kv_dtype is not None and kv_dtype.itemsize == 1
    wider = max(shape.head_size, shape.value_size)
    launch = attention_row(arch, shape.phase, wider, dtype.itemsize, scaled=scaled)
    size = f"D={shape.head_size}" + (f"/{shape.value_size}" if shape.value_size != shape.head_size else "")
    variant = f"{shape.phase} {size} {name}" + (f", cache {cache}" if kv_dtype else "") + f" {extras}".rstrip()
    if isinstance(launch, Refused):
        return Case(op="paged_attention", variant=variant, refused=launch.reason)
    return Case(
        op="paged_attention",
        variant=variant,
        kernel=paged_attention.paged_attention_kernel,
        types=_types(name, cache, scaled=scaled, split=shape.phase == "decode" and bool(extras)),
        constants=_constants(launch, shape, extras, scaled),
        options={"num_warps": launch.num_warps, "num_stages": launch.num_stages, **launch.options},
        needs_matrix=dtype is not torch.float32,
        ones=("num_requests", "num_heads", "table_stride", "window"),
        in_subset=in_subset,
    )


def _types(name: str, cache: str, *, scaled: bool, split: bool) -> dict[str, str]:
    types = {f"{part}_ptr": f"*{name}" for part in ("q", "out", "sinks")}
    types |= {f"{part}_ptr": f"*{cache}" for part in ("key", "value")}
    types |= {f"{part}_ptr": "*fp32" if scaled else f"*{name}" for part in ("key_scale", "value_scale")}
    types |= {f"{part}_ptr": "*i32" for part in ("block_table", "query_start_loc", "seq_lens")}
    types |= {f"{part}_ptr": "*fp32" if split else f"*{name}" for part in ("partial", "stats")}
    return {**types, "slopes_ptr": "*fp32", "scale": "fp32", "soft_cap": "fp32"}


def _constants(launch: AttentionLaunch, shape: _Shape, extras: str, scaled: bool) -> dict[str, Any]:
    decode, latent = shape.phase == "decode", (shape.head_size, shape.value_size) == LATENT_SIZES
    ones = ("k_dim_stride", "v_dim_stride", *(("ks_slot_stride", "vs_slot_stride") if scaled else ()))
    return {
        **paged_attention.constants(launch, shape.group, shape.head_size, 16, shape.value_size, latent),
        "ONE_TOKEN": decode,
        "HAS_WINDOW": "window" in extras,
        "HAS_SOFT_CAP": "cap" in extras,
        "HAS_SINKS": "sinks" in extras,
        "HAS_ALIBI": "ALiBi" in extras,
        "SCALED": scaled,
        "SPLIT": decode and bool(extras),
        **dict.fromkeys(ones, 1),
    }
