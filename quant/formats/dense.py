"""A checkpoint without quantization."""

from __future__ import annotations

import torch

from ...errors import CheckpointError
from ..canonical import DenseWeight
from ..scheme import Dense
from .base import Format, TensorSource
from .dtypes import is_plain


class DenseFormat(Format):
    """One ``<module>.weight`` [N, K] per linear module."""

    name = "dense"

    def scheme(self, module: str) -> Dense:
        return Dense()

    def stored_scheme(self, source: TensorSource, module: str) -> tuple[Dense, tuple[int, int]]:
        """Only asked of weights that are made of codes, which nothing explains here."""
        name = f"{module}.weight"
        raise CheckpointError(
            f"{name} in {source.location(name)} is stored as {source.dtype(name)}, but there is no quantization config "
            f"that says how to read it"
        )

    def _load(self, source: TensorSource, module: str, dtype: torch.dtype) -> DenseWeight:
        return load_dense(source, module)

    def tensor_names(self, module: str) -> tuple[str, ...]:
        return (f"{module}.weight",)


def load_dense(source: TensorSource, module: str) -> DenseWeight:
    """Read ``<module>.weight`` as [N, K], in the dtype that it is stored in."""
    name = f"{module}.weight"
    weight = source.get(name)
    if weight.dim() != 2 or not is_plain(weight.dtype):
        raise CheckpointError(
            f"{name} in {source.location(name)} is {weight.dtype} {list(weight.shape)}; "
            f"a plain linear layer needs a floating-point matrix [N, K]"
        )
    return DenseWeight(weight)
