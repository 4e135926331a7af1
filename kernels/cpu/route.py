"""The choice of experts in C."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import reference
from .library import functions


def moe_route(logits: Tensor, top_k: int, *, renormalize: bool = True, **others: Any) -> tuple[Tensor, Tensor]:
    """``reference.route``: softmax over float32 logits [T,E] here, any other scoring by the reference itself."""
    if others:
        return reference.route(logits, top_k, renormalize=renormalize, **others)
    assert logits.stride(1) == 1 and top_k <= logits.shape[1], "logits must have contiguous rows and top_k experts"
    tokens, experts = logits.shape
    weights, ids = torch.empty((tokens, top_k)), torch.empty((tokens, top_k), dtype=torch.int32)
    functions.twofold_moe_route(
        logits.data_ptr(), tokens, logits.stride(0), experts, top_k, renormalize, weights.data_ptr(), ids.data_ptr()
    )
    return weights, ids
