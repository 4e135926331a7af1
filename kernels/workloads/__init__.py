"""Typical problems of every operation: what the benchmarks time and what the static cost is counted on.

One module per family of operations, with ``workloads(inputs, model, step) -> Iterator[Workload]``; a new one adds
itself to ``FAMILIES``.
"""

from __future__ import annotations

from collections.abc import Iterator

from . import attention, elementwise, experts, latent_attention, linear, lora, quantize, sampling
from .workload import MODELS, SMALL_STEPS, STEPS, Call, Inputs, ModelShapes, Step, Workload

__all__ = [
    "FAMILIES",
    "MODELS",
    "SMALL_STEPS",
    "STEPS",
    "Call",
    "Inputs",
    "ModelShapes",
    "Step",
    "Workload",
    "workloads",
]

FAMILIES = (
    attention,
    elementwise,
    experts,
    latent_attention,
    linear,
    lora,
    quantize,
    sampling,
)


def workloads(inputs: Inputs, model: ModelShapes, step: Step) -> Iterator[Workload]:
    """Every operation of a model's layer in one step. Made one at a time: the tensors of a large model are large."""
    for module in FAMILIES:
        yield from module.workloads(inputs, model, step)
