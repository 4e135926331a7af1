"""A quantized input of a product: 8-bit codes and their scales, and how a product wants them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..quant.scheme import Activation


@dataclass(frozen=True, slots=True, eq=False)
class InputFormat:
    """How a product wants its input quantized.

    ``codes_dtype``    int8, an e4m3 dtype, or a wider float that holds the values of e4m3fn codes exactly, for chips
                       without 8-bit floats.
    ``scale``, ``zero``  float32 scalars of static activations, for codes of ``codes_dtype``; else None.
    """

    how: Activation
    codes_dtype: torch.dtype
    scale: Tensor | None = None
    zero: Tensor | None = None

    def agrees(self, other: InputFormat) -> bool:
        """Whether one quantized input serves both; waits for the device when there are static scales."""
        same = self.how == other.how and self.codes_dtype is other.codes_dtype
        return same and _equal(self.scale, other.scale) and _equal(self.zero, other.zero)


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedInput:
    """``x[t, k] = (code[t, k] - zero) * scale``, with scale and zero of the token's group that k lies in.

    ``codes``  [T,K] of an ``InputFormat``'s ``codes_dtype``.
    ``scale``  float32 [1,1] for one scale in all, [T,1] per token, [T,ceil(K / group_size)] per group.
    ``zero``   int32 like ``scale`` (int8 only), or None: all 0.
    ``dtype``  of the values that were quantized, and of a product's result.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor | None
    how: Activation
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        """[T,K], as of the tensor that it stands for."""
        return self.codes.shape

    @property
    def group_size(self) -> int:
        """Features that share a scale: K where all of a token's do."""
        return self.how.group_size if self.how.group_size > 0 else self.codes.shape[1]

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values [T,K]; in ``dtype`` of the input unless another is asked for."""
        values = self.codes.double()
        if self.zero is not None:
            values = values - self._per_feature(self.zero.double())
        return (values * self._per_feature(self.scale.double())).to(dtype or self.dtype)

    def _per_feature(self, values: Tensor) -> Tensor:
        if values.shape[1] == 1:
            return values
        return values.repeat_interleave(self.group_size, dim=1)[:, : self.codes.shape[1]]


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    return (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))
