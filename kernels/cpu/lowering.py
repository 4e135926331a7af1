"""Operations of torch that a step may contain, and the C kernels that stand for them, bit for bit the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...platforms.graphs import UnrecordableError
from .arena import Arena
from .library import functions

aten = torch.ops.aten
Lowered = Callable[..., Tensor]


def lowered_operations(arena: Arena) -> dict[Any, Lowered]:
    """What to call instead of each operation, with its arguments; results lie in ``arena``."""

    def empty(size: Sequence[int], *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
        return arena.empty(tuple(size), dtype or torch.get_default_dtype())

    def empty_like(x: Tensor, *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
        return arena.empty(tuple(x.shape), dtype or x.dtype)

    def clone(x: Tensor, *, memory_format: Any = None) -> Tensor:
        out = arena.empty(tuple(x.shape), x.dtype)
        _copy(x, out)
        return out

    def cat(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
        first = parts[0]
        dim %= first.dim()
        shape = list(first.shape)
        shape[dim] = sum(part.shape[dim] for part in parts)
        out = arena.empty(tuple(shape), first.dtype)
        start = 0
        for part in parts:
            _copy(part, out.narrow(dim, start, part.shape[dim]))
            start += part.shape[dim]
        return out

    def embedding(weight: Tensor, ids: Tensor, *_: Any, **__: Any) -> Tensor:
        _check(weight, "embedding", torch.float32)
        out = arena.empty((*ids.shape, weight.shape[1]), weight.dtype)
        functions.twofold_gather_rows(
            weight.data_ptr(), weight.stride(0), ids.data_ptr(), ids.numel(), weight.shape[1], out.data_ptr()
        )
        return out

    def index_select(x: Tensor, dim: int, index: Tensor) -> Tensor:
        _check(x, "index_select", torch.float32)
        if x.dim() != 2 or dim not in (1, -1) or index.dtype is not torch.int64:
            raise UnrecordableError("index_select of other than the columns of a matrix")
        out = arena.empty((x.shape[0], index.numel()), x.dtype)
        functions.twofold_gather_columns(
            x.data_ptr(), x.stride(0), index.data_ptr(), x.shape[0], index.numel(), out.data_ptr()
        )
        return out

    def mul(x: Tensor, factor: Any) -> Tensor:
        _check(x, "mul", torch.float32)
        if isinstance(factor, Tensor) or not x.is_contiguous():
            raise UnrecordableError("mul of other than a contiguous tensor by a number")
        out = arena.empty(tuple(x.shape), x.dtype)
        functions.twofold_scale(x.data_ptr(), x.numel(), factor, out.data_ptr())
        return out

    def add_(x: Tensor, y: Any, *, alpha: float = 1) -> Tensor:
        _check(x, "add", torch.float32)
        same = isinstance(y, Tensor) and y.shape == x.shape and y.dtype is x.dtype and y.is_contiguous()
        if alpha != 1 or not same or not x.is_contiguous():
            raise UnrecordableError("add of other than two contiguous tensors of one shape")
        functions.twofold_add(x.data_ptr(), y.data_ptr(), x.numel(), x.data_ptr())
        return x

    def unsafe_view(x: Tensor, size: Sequence[int]) -> Tensor:
        return x.view(tuple(size))

    return {
        aten._unsafe_view.default: unsafe_view,
        aten.empty.memory_format: empty,
        aten.empty_like.default: empty_like,
        aten.clone.default: clone,
        aten.cat.default: cat,
        aten.embedding.default: embedding,
        aten.index_select.default: index_select,
        aten.mul.Tensor: mul,
        aten.add_.Tensor: add_,
    }


def _copy(x: Tensor, out: Tensor) -> None:
    """Up to three dimensions of 4-byte elements, the last one contiguous in both."""
    if x.dim() > 3 or x.element_size() != 4 or x.stride(-1) != 1 or out.stride(-1) != 1:
        raise UnrecordableError(f"a copy of {x.dtype} {list(x.shape)} with strides {list(x.stride())}")
    missing = (None,) * (3 - x.dim())
    x, out = x[missing], out[missing]
    functions.twofold_copy(
        x.data_ptr(), *x.shape, x.stride(0), x.stride(1), out.data_ptr(), out.stride(0), out.stride(1)
    )


def _check(x: Tensor, operation: str, dtype: torch.dtype) -> None:
    if x.dtype is not dtype or x.stride(-1) != 1:
        raise UnrecordableError(f"{operation} of {x.dtype} with strides {list(x.stride())}")
