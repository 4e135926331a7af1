"""Which stored dtypes hold values, and which hold codes of them."""

from __future__ import annotations

import torch

from .base_source import TensorSource


def is_plain(dtype: torch.dtype) -> bool:
    """Whether values of this dtype stand for themselves: floating point, and not the codes of an 8-bit format."""
    return dtype.is_floating_point and dtype.itemsize > 1


def is_stored_plain(source: TensorSource, module: str) -> bool:
    """Whether the module's weight is stored in 16 or 32 bits, whatever scales lie beside it.

    transformers leaves weights whose sides are no multiples of 128 alone, but writes uninitialized scales for them.
    """
    name = f"{module}.weight"
    return source.has(name) and is_plain(source.dtype(name))
