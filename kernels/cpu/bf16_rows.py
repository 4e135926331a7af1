"""Rows of bfloat16 as products of many rows read them."""

from __future__ import annotations

import torch
from torch import Tensor

from . import step_memory

# As in linear_bf16.h and bf16_tiles.h: input features of a step, and rows up to which inputs are read as floats.
STEP_K = 32
FEW_ROWS = 48


def row_stride(columns: int) -> int:
    """Elements from row to row: as ``bf16_row_bytes`` in bf16_rows.h has it."""
    return (-(-columns // STEP_K) | 1) * STEP_K


def empty_rows(rows: int, columns: int) -> Tensor:
    """What takes [T,K] in bfloat16."""
    stride = row_stride(columns)
    return step_memory.empty((rows, stride), torch.bfloat16)[:, :columns]
