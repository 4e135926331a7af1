"""Counter: what kernels that run in triton's interpreter load, store and compute, by pointer argument."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder


@dataclass(slots=True)
class Argument:
    """Bytes of one pointer argument; ``touched`` counts an address once per launch however often it is loaded."""

    name: str
    loaded: int = 0
    touched: int = 0
    stored: int = 0


@dataclass(slots=True)
class _Span:
    """The memory of one tensor of the running launch."""

    argument: Argument
    first: int
    seen: np.ndarray
    element_size: int


class Counter(contextlib.AbstractContextManager["Counter"]):
    """Counts while it is entered. ``arguments`` has a pointer argument of all launches under its name; ``operations``
    are those of matrix products, two for a multiply-add, plus the elements of float arithmetic."""

    def __init__(self) -> None:
        self.arguments: dict[str, Argument] = {}
        self.operations = 0
        self._spans: list[_Span] = []
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Counter:
        self._replace(GridExecutor, "__call__", self._launching)
        self._count(InterpreterBuilder, "create_masked_load", self._load)
        self._count(InterpreterBuilder, "create_masked_store", self._store)
        self._count(InterpreterBuilder, "create_atomic_rmw", self._atomic)
        self._count(InterpreterBuilder, "create_dot", self._dot)
        self._count(InterpreterBuilder, "binary_op", self._arithmetic)
        self._count(InterpreterBuilder, "unary_op", self._arithmetic)
        return self

    def __exit__(self, *details: object) -> None:
        self._stack.close()

    def _replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        original = getattr(owner, name)
        setattr(owner, name, make(original))
        self._stack.callback(setattr, owner, name, original)

    def _count(self, owner: Any, name: str, count: Callable[..., None]) -> None:
        """Call ``count`` with the arguments of each call of a method, before it."""

        def make(original: Any) -> Any:
            def counting(instance: Any, *args: Any, **kwargs: Any) -> Any:
                count(*args, **kwargs)
                return original(instance, *args, **kwargs)

            return counting

        self._replace(owner, name, make)

    def _launching(self, original: Any) -> Any:
        """Note where a launch's tensors lie. A tensor that is passed twice counts as the first of its names."""

        def launch(executor: Any, *args: Any, **kwargs: Any) -> Any:
            named = {**dict(zip(executor.arg_names, args, strict=False)), **kwargs}
            self._spans = [self._span(name, value) for name, value in named.items() if _has_memory(value)]
            result = original(executor, *args, **kwargs)
            for span in self._spans:
                span.argument.touched += int(np.count_nonzero(span.seen)) * span.element_size
            return result

        return launch

    def _span(self, name: str, tensor: Tensor) -> _Span:
        reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        length = (reach + 1) * tensor.element_size()
        argument = self.arguments.setdefault(name, Argument(name))
        return _Span(argument, tensor.data_ptr(), np.zeros(length, dtype=bool), tensor.element_size())

    def _load(self, pointers: Any, mask: Any, *rest: Any, **kwargs: Any) -> None:
        span, places, num_bytes = self._visited(pointers, mask)
        if span is not None:
            span.argument.loaded += num_bytes
            span.seen[places] = True

    def _store(self, pointers: Any, value: Any, mask: Any, *rest: Any, **kwargs: Any) -> None:
        span, _, num_bytes = self._visited(pointers, mask)
        if span is not None:
            span.argument.stored += num_bytes

    def _atomic(self, operation: Any, pointers: Any, value: Any, mask: Any, *rest: Any, **kwargs: Any) -> None:
        self._load(pointers, mask)
        self._store(pointers, value, mask)

    def _visited(self, pointers: Any, mask: Any) -> tuple[_Span | None, np.ndarray, int]:
        """(the tensor that a load or store goes to, offsets in it, bytes), of the lanes that are not masked off."""
        addresses = np.asarray(pointers.data)
        addresses = addresses[np.broadcast_to(np.asarray(mask.data, dtype=bool), addresses.shape)]
        if not addresses.size:
            return None, addresses, 0
        first = int(addresses.min())
        span = next((span for span in self._spans if span.first <= first < span.first + len(span.seen)), None)
        assert span is not None, "a kernel reads or writes outside its arguments"
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        return span, (addresses - np.uint64(span.first)).astype(np.int64), addresses.size * size

    def _dot(self, a: Any, b: Any, *rest: Any, **kwargs: Any) -> None:
        self.operations += 2 * a.data.size * b.data.shape[-1]

    def _arithmetic(self, value: Any, *rest: Any, **kwargs: Any) -> None:
        if value.dtype.scalar.is_floating():
            self.operations += value.data.size


def _has_memory(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() > 0
