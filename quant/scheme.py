"""Scheme: the arithmetic of one quantized linear layer, independent of how any tool lays its bytes out."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Dense:
    """A plain matrix in a floating-point type."""

    def __str__(self) -> str:
        return "dense"


@dataclass(frozen=True, slots=True)
class WeightOnly:
    """Integer weights, floating-point activations: ``W[n, k] = (code[n, k] - zero[n, g]) * scale[n, g]``.

    ``bits``        width of one unsigned code.
    ``group_size``  input features that share a scale and a zero; -1: all K of them (one group per output feature).
    ``symmetric``   every zero is ``2 ** (bits - 1)`` and none is stored.
    ``act_order``   the groups are not runs of neighbouring input features: the weight carries a gather.
    """

    bits: int
    group_size: int
    symmetric: bool = True
    act_order: bool = False

    def resolved_group_size(self, in_features: int) -> int:
        """Group size for K input features, always positive."""
        return in_features if self.group_size == -1 else self.group_size

    def num_groups(self, in_features: int) -> int:
        """G: groups over K input features; the last one may be short."""
        return -(-in_features // self.resolved_group_size(in_features))

    def __str__(self) -> str:
        group = "channel" if self.group_size == -1 else f"g{self.group_size}"
        separator = " " if self.group_size == -1 else ""
        suffix = " act-order" if self.act_order else ""
        return f"w{self.bits}{separator}{group} {'sym' if self.symmetric else 'asym'}{suffix}"


Scheme = Dense | WeightOnly
