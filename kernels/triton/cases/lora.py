"""LoRA's shrinking and expanding products."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from .. import lora
from ..launch_lora import lora_row
from .case import DTYPES, TYPE_NAMES, Case

_TABLES = {f"{name}_ptr": "*i32" for name in ("ids", "order", "blocks")}


def cases(arch: str) -> Iterator[Case]:
    """Both rank classes (in float16, which bfloat16 stands for, one), sorted rows and single, K in parts and whole."""
    for dtype, rank in itertools.product(DTYPES, (16, 64)):
        if dtype is torch.float16 and rank == 64:
            continue
        for aligned, split in ((True, False), (False, True)):
            yield _shrink_case(arch, dtype, rank, aligned=aligned, split=split)
        for aligned in (True, False):
            yield _expand_case(arch, dtype, rank, aligned=aligned)


def _shrink_case(arch: str, dtype: torch.dtype, rank: int, *, aligned: bool, split: bool) -> Case:
    name, launch = TYPE_NAMES[dtype], lora_row(arch, rank, dtype.itemsize)
    return Case(
        op="lora_shrink",
        variant=f"R={rank} {'sorted' if aligned else 'single'} {'parts' if split else 'whole'} {name}",
        kernel=lora.lora_shrink_kernel,
        types={"x_ptr": f"*{name}", "a_ptr": f"*{name}", "out_ptr": "*fp32", **_TABLES},
        constants={**lora.shrink_constants(launch), "ALIGNED": aligned, "SPLIT": split},
        options={"num_warps": launch.num_warps, "num_stages": launch.num_stages},
        ones=("num_blocks", "num_adapters", "num_rows"),
        needs_matrix=dtype is not torch.float32,
        in_subset=dtype is torch.bfloat16 and rank == 16,
    )


def _expand_case(arch: str, dtype: torch.dtype, rank: int, *, aligned: bool) -> Case:
    name, launch = TYPE_NAMES[dtype], lora_row(arch, rank, dtype.itemsize)
    return Case(
        op="lora_expand",
        variant=f"R={rank} {'sorted' if aligned else 'single'} {name}",
        kernel=lora.lora_expand_kernel,
        types={"y_ptr": "*fp32", "b_ptr": f"*{name}", "scales_ptr": "*fp32", "out_ptr": f"*{name}", **_TABLES},
        constants={**lora.expand_constants(launch), "ALIGNED": aligned},
        options={"num_warps": launch.num_warps, "num_stages": launch.num_stages},
        ones=("num_blocks", "num_adapters"),
        needs_matrix=dtype is not torch.float32,
        in_subset=dtype is torch.bfloat16 and rank == 16 and aligned,
    )
