"""Writing keys and values into the cache."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .. import write_kv
from ..launch_table import row_launch
from .case import DTYPES, TYPE_NAMES, Case


def cases(arch: str) -> Iterator[Case]:
    """Head sizes at, under and over a power of two, every dtype."""
    for dtype in DTYPES:
        name, subset = TYPE_NAMES[dtype], dtype is torch.bfloat16
        for head_size in (64, 80, 256):
            caches = {f"{part}_ptr": f"*{name}" for part in ("key", "value", "key_cache", "value_cache")}
            yield Case(
                op="write_kv",
                variant=f"D={head_size} {name}",
                kernel=write_kv.write_kv_kernel,
                types={**caches, "slot_mapping_ptr": "*i64"},
                constants={**write_kv.constants(head_size), "kc_dim_stride": 1, "vc_dim_stride": 1},
                options={"num_warps": row_launch(arch, 1024).num_warps},
                ones=("num_kv_heads", "block_size"),
                in_subset=subset and head_size == 80,
            )
