"""The weights of all experts of a layer: read one after the other, each under the scheme of all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import overload

import torch

from ...errors import UnsupportedError
from ...quant.canonical import CanonicalWeight, merge
from ...quant.experts import common_scheme, with_scheme
from ...quant.scheme import Scheme
from .linear_stack import outline_of

Load = Callable[[str, int], CanonicalWeight]


class SchemesDifferError(Exception):
    """An expert does not fit the scheme of those before it; ``scheme`` is its own."""

    def __init__(self, scheme: Scheme) -> None:
        super().__init__(f"an expert is {scheme}")
        self.scheme = scheme


class CannotMergeError(Exception):
    """Modules of an expert that cannot share a matrix."""


class StreamedExperts(Sequence[CanonicalWeight]):
    """One weight per expert, made of the modules ``names`` stacked along N.

    Each is read when it is asked for and not kept; of the first one its scales and shape stay. ``num_bytes`` counts
    those that were read. Raises SchemesDifferError and CannotMergeError while it is being read.
    """

    def __init__(self, load: Load, names: list[str], num_experts: int, scheme: Scheme | None = None) -> None:
        self._load, self._names, self._num_experts = load, names, num_experts
        self.num_bytes = 0
        self._first = self._read(0, scheme)
        self.scheme: Scheme = self._first.scheme

    def __len__(self) -> int:
        return self._num_experts

    @overload
    def __getitem__(self, index: int) -> CanonicalWeight: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[CanonicalWeight]: ...
    def __getitem__(self, index: int | slice) -> CanonicalWeight | Sequence[CanonicalWeight]:
        assert isinstance(index, int), "experts are read one by one"
        if index == 0:
            return self._first
        if index >= self._num_experts:
            raise IndexError(index)  # ends an iteration
        self._first = outline_of(self._first, torch.float32)
        return self._read(index, self.scheme)

    def _read(self, expert: int, scheme: Scheme | None) -> CanonicalWeight:
        parts = merge([self._load(name, expert) for name in self._names])
        if len(parts) > 1:
            raise CannotMergeError
        weight = parts[0]
        if scheme is not None:
            if common_scheme([scheme, weight.scheme], weight.shape) != scheme:
                raise SchemesDifferError(weight.scheme)
            weight = with_scheme(weight, scheme)
        self.num_bytes += weight.nbytes
        return weight


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
