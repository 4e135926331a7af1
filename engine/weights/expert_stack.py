"""The weights of all experts of a layer, brought to one scheme."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...errors import UnsupportedError
from ...quant.canonical import CanonicalWeight, merge
from ...quant.experts import common_scheme, with_scheme
from ...quant.scheme import Scheme

ExpertStack = tuple[list[str], list[CanonicalWeight]]


def stack_experts(
    load: Callable[[str, int], CanonicalWeight], names: list[str], num_experts: int, layer: str
) -> list[ExpertStack]:
    """(names, a weight of them stacked along N for each expert): one such pair, or one for each of the names where
    some expert's modules cannot share a matrix. ``load(name, expert)`` reads a module."""
    merged = []
    for expert in range(num_experts):
        parts = merge([load(name, expert) for name in names])
        if len(parts) > 1:
            return [
                ([name], _alike([load(name, each) for each in range(num_experts)], f"{layer}.*.{name}"))
                for name in names
            ]
        merged.append(parts[0])
    return [(names, _alike(merged, f"{layer}.*.{'+'.join(names)}"))]


def one_scheme(schemes: Sequence[Scheme], shape: tuple[int, int], layer: str) -> Scheme:
    """The experts' common scheme; UnsupportedError names two that have none."""
    common = common_scheme(schemes, shape)
    if common is None:
        first = schemes[0]
        other = next(scheme for scheme in schemes if common_scheme([first, scheme], shape) is None)
        raise UnsupportedError(
            f"{layer}: some experts are {first} and some {other}; experts of a layer are served in one scheme, so "
            f"quantize them alike"
        )
    return common


def _alike(weights: list[CanonicalWeight], layer: str) -> list[CanonicalWeight]:
    scheme = one_scheme([weight.scheme for weight in weights], weights[0].shape, layer)
    return [with_scheme(weight, scheme) for weight in weights]
