"""SiLU or GELU of the gate, times up."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .. import activations
from ..launch_table import row_launch
from .case import DTYPES, TYPE_NAMES, Case


def cases(arch: str) -> Iterator[Case]:
    """Every activation and dtype."""
    for dtype in DTYPES:
        name, subset = TYPE_NAMES[dtype], dtype is torch.bfloat16
        for activation in ("silu", "gelu", "gelu_tanh"):
            yield Case(
                op="act_and_mul",
                variant=f"{activation} {name}",
                kernel=activations.act_and_mul_kernel,
                types={"x_ptr": f"*{name}", "out_ptr": f"*{name}"},
                constants=activations.constants(activation),
                options={"num_warps": row_launch(arch, 1024).num_warps},
                in_subset=subset,
            )
