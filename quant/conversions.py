"""What compiled code does many times faster than torch's operations: words rearranged, loops over columns.

This room knows no kernels: whoever has such code offers it here, and readers of formats and methods use what is
offered, or else do the same in torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

# Returns None for what it cannot do: where nothing is compiled, or tensors lie elsewhere than in the computer's memory.
Conversion = Callable[..., Tensor | None]

_offered: dict[str, Conversion] = {}


def offer(name: str, conversion: Conversion) -> None:
    """Have ``convert(name, ...)`` call this; a later offer takes an earlier one's place."""
    _offered[name] = conversion


def convert(name: str, *arguments: Any) -> Tensor | None:
    """The result of what was offered as ``name``, or None where the caller has to do it."""
    conversion = _offered.get(name)
    return None if conversion is None else conversion(*arguments)
