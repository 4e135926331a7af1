"""Rotary embedding of queries and keys."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from .. import rope
from ..launch_table import row_launch
from .case import DTYPES, TYPE_NAMES, Case


def cases(arch: str) -> Iterator[Case]:
    """Both pairings and two rotary sizes in bfloat16, both pairings in every dtype."""
    for dtype in DTYPES:
        name, subset = TYPE_NAMES[dtype], dtype is torch.bfloat16
        for interleaved, rotary in itertools.product((False, True), (64, 128) if subset else (128,)):
            yield Case(
                op="rope",
                variant=f"R={rotary} {'interleaved' if interleaved else 'neox'} {name}",
                kernel=rope.rope_kernel,
                types={"q_ptr": f"*{name}", "k_ptr": f"*{name}", "cos_sin_ptr": "*fp32", "positions_ptr": "*i64"},
                constants=rope.constants(rotary, interleaved),
                options={"num_warps": row_launch(arch, 1).num_warps},
                ones=("num_heads", "num_kv_heads"),
                in_subset=subset and rotary == 128,
            )
