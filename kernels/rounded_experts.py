"""Experts in C whose input is rounded as their scheme says: once for all experts, or for each where their static
scales differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..quant.canonical import CanonicalWeight
from ..quant.eight_bit import same_input
from ..quant.scheme import Activation
from .cpu.experts import ExpertPanels, expert_linear, of_panels
from .quantized_linear import RoundedInput
from .reference import fake_quantize


@dataclass(frozen=True, slots=True, eq=False)
class RoundedExperts:
    """``scale`` and ``zero`` float32 of static activations: scalars, or [E] where they differ; else None."""

    experts: ExpertPanels
    activation: Activation
    scale: Tensor | None
    zero: Tensor | None


def prepare(
    prepare_one: Callable[[CanonicalWeight, torch.dtype], RoundedInput],
    weights: Sequence[CanonicalWeight],
    dtype: torch.dtype,
) -> RoundedExperts:
    """The experts' panels, each prepared by ``prepare_one`` of a linear candidate."""
    parts = [prepare_one(weight, dtype) for weight in weights]
    first = parts[0]
    scale, zero = first.scale, first.zero
    if not all(same_input((first.scale, first.zero), (part.scale, part.zero)) for part in parts):
        scale = _stacked([part.scale for part in parts])
        zero = _stacked([part.zero for part in parts])
    return RoundedExperts(of_panels([part.weight for part in parts]), first.activation, scale, zero)


def run(x: Tensor, prepared: RoundedExperts, expert_ids: Tensor, routing_weights: Tensor | None = None) -> Tensor:
    """``reference.expert_linear`` of the rounded input."""
    scale, zero = prepared.scale, prepared.zero
    if scale is not None and scale.numel() > 1:
        ids = expert_ids.clamp(min=0)
        inner = (1, 1) if prepared.activation.group_size > 0 else (1,)  # groups of features, or features
        scale, zero = (None if value is None else value[ids].view(*ids.shape, *inner) for value in (scale, zero))
        x = x if x.dim() == 3 else x[:, None].expand(-1, expert_ids.shape[1], -1)
    return expert_linear(
        fake_quantize(x, prepared.activation, scale, zero), prepared.experts, expert_ids, routing_weights
    )


def _stacked(values: list[Tensor | None]) -> Tensor | None:
    given = [value.reshape(()) for value in values if value is not None]
    return torch.stack(given) if len(given) == len(values) else None
