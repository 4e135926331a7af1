"""Seeded problems of every operation with the definition's answer: what `twofold doctor` and tests judge kernels by.

One module per family of operations, with ``cases(source) -> list[Case]``; a new one adds itself to ``FAMILIES``.
"""

from __future__ import annotations

from . import attention, elementwise, lora, products, sampling
from .case import ACTIVATIONS, TYPICAL, Answer, Case, Sizes, Source

__all__ = ["ACTIVATIONS", "FAMILIES", "TYPICAL", "Answer", "Case", "Sizes", "Source", "make_cases"]

FAMILIES = (elementwise, products, attention, sampling, lora)


def make_cases(source: Source) -> list[Case]:
    """Every operation; on a CPU in every scheme, cache and ``--cpu-activations`` that its kernels know."""
    return [case for module in FAMILIES for case in module.cases(source)]
