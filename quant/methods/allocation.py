"""``auto``: which group of layers gets how many bits, so that the predicted divergence is least under a budget."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import CheckpointError
from ..calibration.block_model import BlockModel
from ..canonical import dequantize
from ..formats import TensorSource
from ..plan import QuantizePlan, storable, stored_bits
from ..scheme import Scheme, WeightOnly
from .gptq import GPTQOptions, inverse_diagonal, quantize_gptq
from .grid import in_groups, search_grid
from .sensitivity import LayerSensitivity, layer_sensitivities
from .statistics import InputStatistics

# (decoder layers measured, decoder layers in all)
Progress = Callable[[int, int], None]
# Output features whose rounding stands for those of a whole matrix.
SAMPLED_ROWS = 64
# What GPTQ rounds them to, to see how it does on tokens that it has not seen.
TRIED_BITS, TRIED_GROUP = 4, 32


@dataclass(frozen=True, slots=True)
class Choice:
    """One scheme for a unit: bits that it takes in the files, nats a token that it is predicted to cost."""

    scheme: Scheme
    bits: int
    cost: float


@dataclass(frozen=True, slots=True)
class Unit:
    """Modules that must share a scheme, by full names, and what they may get."""

    modules: tuple[str, ...]
    choices: tuple[Choice, ...]


def allocate(
    model: BlockModel,
    windows: Tensor,
    plan: QuantizePlan,
    source: TensorSource,
    budget: int,
    progress: Progress | None = None,
) -> dict[str, Scheme]:
    """The scheme of each module of ``plan``; all their tensors take at most ``budget`` bits."""
    modules = {
        layer.number: {
            model.module_name(name).removeprefix(f"{model.layer_name(layer.number)}."): name for name in layer.quantize
        }
        for layer in plan.layers
        if layer.number is not None
    }
    units: list[Unit] = []
    measured = layer_sensitivities(model, windows, {number: list(names) for number, names in modules.items()})
    for done, found in enumerate(measured, 1):
        units += _units(found, modules[found.index], plan, source)
        if progress is not None:
            progress(done, model.num_layers)
    return {
        module: choice.scheme
        for unit, choice in zip(units, spend([unit.choices for unit in units], budget), strict=True)
        for module in unit.modules
    }


def spend(units: Iterable[tuple[Choice, ...]], budget: int) -> list[Choice]:
    """A choice for each unit: from the smallest of all, always the step that lowers the cost most for its bits.

    Steps lead along the lower convex hull of a unit's choices; what is left is spent on any step that still fits.
    """
    hulls = [_hull(choices) for choices in units]
    chosen = [0] * len(hulls)
    left = budget - sum(hull[0].bits for hull in hulls)
    while True:
        steps = [
            ((hull[at].cost - hull[at + 1].cost) / (hull[at + 1].bits - hull[at].bits), number)
            for number, (hull, at) in enumerate(zip(hulls, chosen, strict=True))
            if at + 1 < len(hull) and hull[at + 1].bits - hull[at].bits <= left
        ]
        if not steps:
            return [hull[at] for hull, at in zip(hulls, chosen, strict=True)]
        _, number = max(steps)
        left -= hulls[number][chosen[number] + 1].bits - hulls[number][chosen[number]].bits
        chosen[number] += 1


def _hull(choices: Iterable[Choice]) -> list[Choice]:
    """Choices that are best at some price of a bit, smallest first."""
    hull: list[Choice] = []
    for choice in sorted(choices, key=lambda one: (one.bits, one.cost)):
        if hull and choice.cost >= hull[-1].cost:
            continue
        while len(hull) > 1 and _slope(hull[-1], choice) >= _slope(hull[-2], hull[-1]):
            hull.pop()
        hull.append(choice)
    return hull


def _slope(first: Choice, second: Choice) -> float:
    return (first.cost - second.cost) / (second.bits - first.bits)


def _units(
    found: LayerSensitivity, names: Mapping[str, str], plan: QuantizePlan, source: TensorSource
) -> Iterable[Unit]:
    """Modules that read one input are a unit; so are all experts' of one kind, whose matrices share a kernel."""
    members: dict[str, list[str]] = {}
    costs: dict[str, dict[Scheme, float]] = {}
    for group in found.groups:
        kind = "/".join(name.rpartition(".")[2] for name in group.modules) if group.is_routed else group.first
        members.setdefault(kind, []).extend(group.modules)
        group_costs = _costs(found, group.first, group.modules, plan)
        for scheme, cost in group_costs.items():
            every = costs.setdefault(kind, {})
            every[scheme] = every.get(scheme, 0.0) + cost
    for kind, modules in members.items():
        full = tuple(names[name] for name in modules)
        shapes = [source.shape(f"{name}.weight") for name in full]
        fitting = [
            scheme
            for scheme in costs[kind]
            if all(scheme in storable(plan.writer, shape, plan.spec) for shape in shapes)
        ]
        yield Unit(
            full,
            tuple(
                Choice(scheme, sum(stored_bits(plan.writer, shape, scheme) for shape in shapes), costs[kind][scheme])
                for scheme in fitting
            ),
        )


def _costs(found: LayerSensitivity, first: str, modules: Iterable[str], plan: QuantizePlan) -> dict[Scheme, float]:
    """Predicted nats a token for each scheme.

    GPTQ's error is the sum over columns of squared roundings over the squares of its factor's diagonal. That holds for
    the tokens that the factor is made from. On others it is larger, several times so for inputs as wide as there are
    tokens: GPTQ rounds some rows for one scheme, tokens that it has not seen tell by how much, and all costs rise so.
    """
    parts = [_sample(found, name) for name in modules]
    rows, information = torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
    diagonal = inverse_diagonal(found.statistics[first].hessian, GPTQOptions().damping)
    costs: dict[Scheme, float] = {}
    for scheme in plan.spec.schemes:
        assert isinstance(scheme, WeightOnly), f"{scheme} has no bits to choose"
        errors = (_nearest(rows, scheme) - rows).square() @ diagonal
        costs[scheme] = 0.5 * float((errors * information).sum())
    tried = WeightOnly(TRIED_BITS, TRIED_GROUP, plan.spec.symmetric)
    held_out = found.held_out[first]
    if held_out.num_tokens and costs[tried] > 0:
        factor = _measured(rows, information, tried, found.statistics[first], held_out, first) / costs[tried]
        costs = {scheme: factor * cost for scheme, cost in costs.items()}
    return costs


def _sample(found: LayerSensitivity, name: str) -> tuple[Tensor, Tensor]:
    """Rows of a weight, and the information at their outputs that stands for that of all rows."""
    every = -(-found.weights[name].shape[0] // SAMPLED_ROWS)
    information = found.information[name]
    share = information.sum() / information[::every].sum().clamp(min=1e-30)
    return found.weights[name][::every], information[::every] * share


def _measured(
    rows: Tensor,
    information: Tensor,
    scheme: WeightOnly,
    statistics: InputStatistics,
    held_out: InputStatistics,
    name: str,
) -> float:
    """Nats a token that ``rows`` cost on tokens ``held_out`` after GPTQ has rounded them."""
    try:
        outcome = quantize_gptq(rows, statistics, scheme, GPTQOptions(order="static"))
    except ValueError as error:
        raise CheckpointError(f"{name}: {error}") from None
    missed = dequantize(outcome.weight).to(rows) - rows
    return 0.5 * float((((missed @ held_out.hessian) * missed).sum(1) * information).sum())


def _nearest(weight: Tensor, scheme: WeightOnly) -> Tensor:
    groups = in_groups(weight, scheme.resolved_group_size(weight.shape[1]))
    grid = search_grid(groups, scheme)
    return grid.levels(groups, 2**scheme.bits - 1).mul_(grid.scale).flatten(1)[:, : weight.shape[1]]
