"""Paged attention and the reduction over splits."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import torch

from .. import paged_attention
from ..launch_table import Refused, attention_row
from .case import DTYPES, TYPE_NAMES, Case

HEAD_SIZES = (64, 80, 128, 256)
GROUP = 4


def cases(arch: str) -> Iterator[Case]:
    """Every launch row and dtype, the extras, caches of another dtype, and the reduction."""
    for dtype, phase, head_size in itertools.product(DTYPES, ("decode", "prefill"), HEAD_SIZES):
        if head_size != 80 or dtype is torch.bfloat16:
            yield _attention_case(arch, dtype, phase, head_size, extras=False)
        if head_size in (128, 256) and dtype is not torch.float16:
            yield _attention_case(arch, dtype, phase, head_size, extras=True)
    for cache in ("fp16", "fp32"):
        case = _attention_case(arch, torch.bfloat16, "decode", 128, extras=False)
        types = {**case.types, "key_ptr": f"*{cache}", "value_ptr": f"*{cache}"}
        yield replace(case, variant=f"{case.variant}, cache {cache}", types=types, in_subset=False)
    for dtype in DTYPES:
        yield Case(
            op="reduce_splits",
            variant=f"D=128 {TYPE_NAMES[dtype]}",
            kernel=paged_attention.reduce_splits_kernel,
            types={"partial_ptr": "*fp32", "stats_ptr": "*fp32", "out_ptr": f"*{TYPE_NAMES[dtype]}"},
            constants=paged_attention.reduce_constants(128, paged_attention.MAX_SPLITS),
            options={"num_warps": 4},
            in_subset=dtype is torch.bfloat16,
        )


def _attention_case(arch: str, dtype: torch.dtype, phase: str, head_size: int, *, extras: bool) -> Case:
    """``extras``: sliding window and soft cap, and for decode a single token per request with split contexts."""
    name = TYPE_NAMES[dtype]
    launch = attention_row(arch, phase, head_size, dtype.itemsize)
    variant = f"{phase} D={head_size} {name}" + (" window, cap" if extras else "")
    if isinstance(launch, Refused):
        return Case(op="paged_attention", variant=variant, refused=launch.reason)
    decode = phase == "decode"
    flags = {"ONE_TOKEN": decode, "HAS_WINDOW": extras, "HAS_SOFT_CAP": extras, "SPLIT": decode and extras}
    pointers = {f"{part}_ptr": f"*{name}" for part in ("q", "key", "value", "out")}
    pointers |= {f"{part}_ptr": "*i32" for part in ("block_table", "query_start_loc", "seq_lens")}
    split = "*fp32" if decode and extras else f"*{name}"
    return Case(
        op="paged_attention",
        variant=variant,
        kernel=paged_attention.paged_attention_kernel,
        types={**pointers, "partial_ptr": split, "stats_ptr": split, "scale": "fp32", "soft_cap": "fp32"},
        constants={
            **paged_attention.constants(launch, GROUP, head_size, 16),
            **flags,
            "k_dim_stride": 1,
            "v_dim_stride": 1,
        },
        options={"num_warps": launch.num_warps, "num_stages": launch.num_stages, **launch.options},
        needs_matrix=dtype is not torch.float32,
        ones=("num_requests", "num_heads", "table_stride", "window"),
        in_subset=dtype is torch.bfloat16 and head_size in (64, 128) and extras == (head_size == 128),
    )
