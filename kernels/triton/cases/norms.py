"""RMSNorm, with and without the residual add."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from .. import rms_norm
from ..launch_table import row_launch
from .case import DTYPES, TYPE_NAMES, Case


def cases(arch: str) -> Iterator[Case]:
    """Row lengths of each launch class, every dtype; bfloat16 stands for both 16-bit types in all but one."""
    for dtype in DTYPES:
        yield from _norm_cases(arch, dtype)


def _norm_cases(arch: str, dtype: torch.dtype) -> Iterator[Case]:
    name = TYPE_NAMES[dtype]
    pointers = {f"{part}_ptr": f"*{name}" for part in ("x", "residual", "weight", "out", "new_residual")}
    for columns, add in itertools.product((128, 4096, 8192, 20480), (False, True)):
        if dtype is torch.float16 and columns != 8192:
            continue
        launch = row_launch(arch, columns)
        yield Case(
            op="add_rms_norm" if add else "rms_norm",
            variant=f"K={columns} {name}",
            kernel=rms_norm.rms_norm_kernel,
            types={**pointers, "eps": "fp32", "offset": "fp32"},
            constants={**rms_norm.constants(columns, launch), "ADD": add},
            options={"num_warps": launch.num_warps},
            ones=("num_rows", "inner"),
            in_subset=dtype is torch.bfloat16 and columns == 8192,
        )
