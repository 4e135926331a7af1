"""Conversions of packed words in C, offered to the readers of formats (``quant.conversions``)."""

from __future__ import annotations

import torch
from torch import Tensor

from ...quant.conversions import offer
from ...quant.packing import num_words
from . import weight_memory
from .library import functions, unavailable


def offer_conversions() -> None:
    """Nothing is compiled or loaded before one of them is wanted."""
    offer("stream_of_interleaved", stream_of_interleaved)
    offer("gather_codes", gather_codes)


def stream_of_interleaved(words: Tensor) -> Tensor | None:
    """``awq_packing.stream_of_interleaved``: int32 [K, C], K a multiple of 8, to int32 [K / 8, 8 C]."""
    if words.device.type != "cpu" or unavailable() is not None:
        return None
    words = words.contiguous()
    rows, columns = words.shape
    stream = _words(rows // 8, columns * 8)
    functions.twofold_interleaved_stream(words.data_ptr(), rows, columns, stream.data_ptr())
    return stream


def gather_codes(words: Tensor, order: Tensor, bits: int) -> Tensor | None:
    """Codes ``order`` int32 [K] of a transposed stream: int32 [.., N] to int32 [ceil(K * bits / 32), N]."""
    if words.device.type != "cpu" or bits not in (2, 4, 8) or unavailable() is not None:
        return None
    words, order = words.contiguous(), order.to(torch.int32).contiguous()
    result = _words(num_words(len(order), bits), words.shape[1])
    functions.twofold_gather_codes(
        words.data_ptr(), words.shape[1], order.data_ptr(), len(order), bits, result.data_ptr()
    )
    return result


def _words(rows: int, columns: int) -> Tensor:
    """int32 [rows, columns], used up as soon as it is packed."""
    return weight_memory.scratch(4 * rows * columns).view(torch.int32).view(rows, columns)
