"""Activations quantized for the products of 8-bit codes."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ...quant.scheme import Activation, Element
from ..problems import QuantizeProblem
from ..registry import Candidate
from .workload import Call, Inputs, ModelShapes, Step, Workload


def workloads(inputs: Inputs, model: ModelShapes, step: Step) -> Iterator[Workload]:
    """One scale per token, in every 8-bit type of the device."""
    yield _quantize(inputs, model, step, Activation(Element.INT8), torch.int8)
    if inputs.fp8 is not None:
        yield _quantize(inputs, model, step, Activation(Element.FP8), inputs.fp8)


def _quantize(
    inputs: Inputs, model: ModelShapes, step: Step, activation: Activation, codes_dtype: torch.dtype
) -> Workload:
    x = inputs.randn(step.num_tokens, model.hidden)

    def bind(candidate: Candidate) -> Call:
        return lambda: candidate.run(x, activation, codes_dtype=codes_dtype)

    return Workload(
        op="quantize_activation",
        label=f"{activation}, {step.num_tokens}x{model.hidden}",
        problem=QuantizeProblem(activation=activation, codes_dtype=codes_dtype, dtype=inputs.dtype),
        bind=bind,
        num_bytes=x.nbytes + x.numel() + 4 * step.num_tokens,
        operations=3 * x.numel(),
    )
