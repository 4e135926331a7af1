"""What the ahead-of-time check compiles: every kernel, dtype and launch row, specialized as the launchers do.

One module per family of kernels, with ``cases(arch) -> Iterator[Case]``; a new one adds itself to ``FAMILIES``.
"""

from __future__ import annotations

from collections.abc import Iterator

from . import activations, attention, experts, kv_cache, linear, lora, norms, rope, sampling, scaled
from .case import Case, with_ones

__all__ = ["FAMILIES", "Case", "cases"]

FAMILIES = (
    activations,
    attention,
    experts,
    kv_cache,
    linear,
    lora,
    norms,
    rope,
    sampling,
    scaled,
)


def cases(arch: str) -> Iterator[Case]:
    """Every case of an architecture; names are unique."""
    for module in FAMILIES:
        yield from with_ones(module.cases(arch))
