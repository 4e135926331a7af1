"""Scheme: the arithmetic of one quantized linear layer, independent of how any tool lays its bytes out."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Element(str, enum.Enum):
    """What one quantized number is."""

    INT8 = "int8"
    FP8 = "fp8"
    FP4 = "fp4"


@dataclass(frozen=True, slots=True)
class Activation:
    """How the input of a product is quantized; ``kernels/reference`` (``fake_quantize``) defines the arithmetic.

    ``element``     int8, fp8 (e4m3) or fp4 (e2m1).
    ``group_size``  input features that share a scale: 0 one scale for everything, -1 one per token.
    ``dynamic``     scales come from the values themselves; else from the checkpoint (``group_size`` 0, and for fp4 the
                    scale of the groups' scales).
    ``symmetric``   no zero point (int8 only).
    ``power_of_two``  scales are powers of two (the OCP microscaling formats).
    """

    element: Element
    group_size: int = -1
    dynamic: bool = True
    symmetric: bool = True
    power_of_two: bool = False

    @property
    def bits(self) -> int:
        return 4 if self.element is Element.FP4 else 8

    def __str__(self) -> str:
        kind = f"a{self.bits}" if self.element is Element.INT8 else f"a-{'mx' * self.power_of_two}{self.element.value}"
        grain = {0: "tensor", -1: "token"}.get(self.group_size, f"g{self.group_size}")
        return f"{kind} {grain}{'' if self.dynamic else ' static'}{'' if self.symmetric else ' asym'}"


@dataclass(frozen=True, slots=True)
class Dense:
    """A plain matrix in a floating-point type."""

    def __str__(self) -> str:
        return "dense"


@dataclass(frozen=True, slots=True)
class _Groups:
    """Integer codes in groups along K; see ``WeightOnly``."""

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


@dataclass(frozen=True, slots=True)
class WeightOnly(_Groups):
    """Integer weights, floating-point activations: ``W[n, k] = (code[n, k] - zero[n, g]) * scale[n, g]``.

    ``bits``        width of one unsigned code.
    ``group_size``  input features that share a scale and a zero; -1: all K of them (one group per output feature).
    ``symmetric``   every zero is ``2 ** (bits - 1)`` and none is stored.
    ``act_order``   the groups are not runs of neighbouring input features: the weight carries a gather.
    """


@dataclass(frozen=True, slots=True)
class Offset(_Groups):
    """Integer weights with a float per group instead of a zero: ``W[n, k] = code[n, k] * scale[n, g] + offset[n, g]``.

    So GGUF's types with a minimum have it, and AWQ's gemv_fast, which stores rounded products ``-scale * zero``.
    """

    symmetric: bool = False

    def __str__(self) -> str:
        group = "channel" if self.group_size == -1 else f"g{self.group_size}"
        return f"w{self.bits}{' ' if self.group_size == -1 else ''}{group} offset{' act-order' * self.act_order}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LowBit(_Groups):
    """Integer weights as in ``WeightOnly``, and quantized activations (W4A8 with int8 or fp8 activations)."""

    activation: Activation

    def __str__(self) -> str:
        return f"{_Groups.__str__(self)} {self.activation}"


@dataclass(frozen=True, slots=True)
class _Blocks:
    """8-bit codes with one scale per block of ``block`` = (output, input) features; -1 means all of them.

    (-1, -1) is one scale per tensor, (1, -1) one per output channel, (1, g) groups, (128, 128) square blocks.
    """

    block: tuple[int, int]

    def resolved_block(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Block for a matrix [N, K], always positive."""
        rows, columns = (side if block == -1 else block for side, block in zip(shape, self.block, strict=True))
        return rows, columns

    def num_blocks(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Shape of the scales of a matrix [N, K]; the last block of each side may be short."""
        rows, columns = self.resolved_block(shape)
        return -(-shape[0] // rows), -(-shape[1] // columns)

    def grain(self) -> str:
        """``tensor``, ``channel``, ``g32`` or ``128x128``."""
        rows, columns = self.block
        if self.block in ((-1, -1), (1, -1)):
            return "tensor" if rows == -1 else "channel"
        return f"g{columns}" if rows == 1 else f"{rows}x{'K' if columns == -1 else columns}"


@dataclass(frozen=True, slots=True)
class Int8(_Blocks):
    """W8A8 in integers: ``W = (code - zero) * scale`` with int8 codes, and int8 activations.

    ``symmetric``: no zero points are stored (all are 0).
    """

    activation: Activation
    symmetric: bool = True

    def __str__(self) -> str:
        return f"int8 {self.grain()}{'' if self.symmetric else ' asym'} {self.activation}"


@dataclass(frozen=True, slots=True)
class Fp8(_Blocks):
    """``W = code * scale`` with e4m3 codes; activations are quantized, or stay as they are (None)."""

    activation: Activation | None = None

    def __str__(self) -> str:
        return f"fp8 {self.grain()}{'' if self.activation is None else f' {self.activation}'}"


@dataclass(frozen=True, slots=True)
class MicroScaled:
    """Small floats with an 8-bit scale per group along K: MXFP4, MXFP8 (OCP microscaling) and NVFP4.

    ``W[n, k] = element[n, k] * scale[n, g]``, in NVFP4 divided by a global scale too. ``power_of_two``: scales are
    e8m0 exponents, else e4m3.
    """

    element: Element
    group_size: int
    power_of_two: bool
    activation: Activation | None = None

    def __str__(self) -> str:
        name = f"{'mx' if self.power_of_two else 'nv'}{self.element.value}"
        return f"{name} g{self.group_size}{'' if self.activation is None else f' {self.activation}'}"


Scheme = Dense | WeightOnly | Offset | LowBit | Int8 | Fp8 | MicroScaled


def activation_of(scheme: Scheme) -> Activation | None:
    """How a scheme quantizes its input; None: not at all."""
    return None if isinstance(scheme, Dense | WeightOnly | Offset) else scheme.activation
