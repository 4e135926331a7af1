"""One scheme for all experts of a layer: a kernel takes their weights as one array.

Tools write experts alike, but values can make them differ: zeros that all turn out to be the middle one, groups that
turn out to be in order, equal scales that need only one number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from .canonical import CanonicalWeight, PackedWeight
from .eight_bit import EightBitWeight, with_row_blocks
from .scheme import Fp8, Int8, LowBit, Offset, Scheme, WeightOnly

_Integers = WeightOnly | Offset | LowBit
WithInput = TypeVar("WithInput", LowBit, Int8)


def common_scheme(schemes: Sequence[Scheme], shape: tuple[int, int]) -> Scheme | None:
    """The scheme that can hold weights [N, K] of all ``schemes`` without a change of value; None: there is none."""
    first = schemes[0]
    if all(scheme == first for scheme in schemes):
        return first
    if any(type(scheme) is not type(first) for scheme in schemes):
        return None
    wanted = _integers(schemes, shape) if isinstance(first, _Integers) else _blocks(schemes, shape)
    return wanted if wanted is not None and all(_fits(scheme, wanted) for scheme in schemes) else None


def with_scheme(weight: CanonicalWeight, scheme: Scheme) -> CanonicalWeight:
    """The same values under the ``common_scheme`` of several weights."""
    if weight.scheme == scheme:
        return weight
    if isinstance(weight, EightBitWeight):
        return _eight_bit(weight, scheme)
    assert isinstance(weight, PackedWeight) and isinstance(scheme, _Integers), f"no change from {weight.scheme}"
    columns = weight.shape[1]
    factor = weight.group_size // scheme.resolved_group_size(columns)
    groups = scheme.num_groups(columns)
    zeros = weight.zeros
    if zeros is None and not scheme.symmetric:
        zeros = torch.full_like(weight.scales, 2 ** (scheme.bits - 1), dtype=torch.uint8)
    perm = weight.perm
    if perm is None and scheme.act_order:
        perm = torch.arange(columns, dtype=torch.int32, device=weight.qweight.device)
    return replace(
        weight,
        scheme=scheme,
        scales=_spread(weight.scales, factor, groups),
        zeros=None if zeros is None else _spread(zeros, factor, groups),
        perm=perm,
        input_zero=_input_zero(weight, scheme),
    )


def _integers(schemes: Sequence[Scheme], shape: tuple[int, int]) -> Scheme:
    """The finest groups; zeros and a gather where any weight has them."""
    integers = [scheme for scheme in schemes if isinstance(scheme, _Integers)]
    size = math.gcd(*(scheme.resolved_group_size(shape[1]) for scheme in integers))
    wanted = replace(
        integers[0],
        group_size=-1 if size >= shape[1] else size,
        symmetric=all(scheme.symmetric for scheme in integers),
        act_order=any(scheme.act_order for scheme in integers),
    )
    return _common_activation(wanted, schemes) if isinstance(wanted, LowBit) else wanted


def _blocks(schemes: Sequence[Scheme], shape: tuple[int, int]) -> Scheme | None:
    """The finest blocks of rows; zeros where any weight has them."""
    blocks = [scheme for scheme in schemes if isinstance(scheme, Int8 | Fp8)]
    if len(blocks) < len(schemes):
        return None
    heights = [scheme.resolved_block(shape)[0] for scheme in blocks]
    rows = -1 if all(scheme.block[0] == -1 for scheme in blocks) else math.gcd(*heights)
    wanted = replace(blocks[0], block=(rows, blocks[0].block[1]))
    if not isinstance(wanted, Int8):
        return wanted
    wanted = replace(wanted, symmetric=all(scheme.symmetric for scheme in blocks if isinstance(scheme, Int8)))
    return _common_activation(wanted, schemes)


def _common_activation(wanted: WithInput, schemes: Sequence[Scheme]) -> WithInput:
    symmetric = all(scheme.activation.symmetric for scheme in schemes if isinstance(scheme, LowBit | Int8))
    return replace(wanted, activation=replace(wanted.activation, symmetric=symmetric))


def _fits(scheme: Scheme, wanted: Scheme) -> bool:
    """Whether the two differ in nothing but what ``with_scheme`` changes."""
    if isinstance(scheme, _Integers) and isinstance(wanted, _Integers):
        alike: Scheme = replace(
            scheme, group_size=wanted.group_size, symmetric=wanted.symmetric, act_order=wanted.act_order
        )
    elif isinstance(scheme, Int8) and isinstance(wanted, Int8):
        alike = replace(scheme, block=(wanted.block[0], scheme.block[1]), symmetric=wanted.symmetric)
    else:
        assert isinstance(scheme, Fp8) and isinstance(wanted, Fp8), "other schemes have no common one"
        alike = replace(scheme, block=(wanted.block[0], scheme.block[1]))
    if isinstance(alike, LowBit | Int8) and isinstance(wanted, LowBit | Int8):
        alike = replace(alike, activation=replace(alike.activation, symmetric=wanted.activation.symmetric))
    return alike == wanted


def _eight_bit(weight: EightBitWeight, scheme: Scheme) -> EightBitWeight:
    assert isinstance(scheme, Int8 | Fp8), f"no change from {weight.scheme} to {scheme}"
    rows, zeros = scheme.block[0], weight.zeros
    if zeros is None and isinstance(scheme, Int8) and not scheme.symmetric:
        zeros = torch.zeros_like(weight.scales, dtype=torch.int8)
    return replace(
        weight,
        scheme=scheme,
        scales=with_row_blocks(weight, weight.scales, rows),
        zeros=None if zeros is None else with_row_blocks(weight, zeros, rows),
        input_zero=_input_zero(weight, scheme),
    )


def _input_zero(weight: PackedWeight | EightBitWeight, scheme: Scheme) -> Tensor | None:
    """A zero of 0 where other experts' static inputs have another."""
    static = isinstance(scheme, LowBit | Int8) and not scheme.activation.dynamic
    if weight.input_zero is not None or not static or scheme.activation.symmetric:  # type: ignore[union-attr]
        return weight.input_zero
    assert weight.input_scale is not None, "static activations have a scale"
    return torch.zeros_like(weight.input_scale)


def _spread(values: Tensor, factor: int, groups: int) -> Tensor:
    """One value per group [N, G] for groups that are ``factor`` times smaller."""
    return values if factor == 1 else values.repeat_interleave(factor, dim=1)[:, :groups].contiguous()
