"""Joining parts of a matrix along their rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def stack_rows(tensors: Sequence[Tensor]) -> Tensor:
    """The tensors, which have one dtype, one after the other along dimension 0.

    On the meta device torch.cat is written in Python and imports torch's compiler, which takes seconds; there only the
    shape matters.
    """
    first = tensors[0]
    if first.device.type == "meta":
        rows = sum(tensor.shape[0] for tensor in tensors)
        return torch.empty((rows, *first.shape[1:]), dtype=first.dtype, device="meta")
    return torch.cat(list(tensors))
