"""Repairs triton's CPU interpreter for narrow floats; ``repair()`` before running a kernel under TRITON_INTERPRET=1.

The interpreter keeps bfloat16 as uint16 and the 8-bit floats as uint8. Unrepaired (triton 3.7 to 3.9) it does
arithmetic on those bit patterns, truncates when it narrows, drops the mantissa carry on the way to fp8 and reads fp8's
NaN and infinity codes as numbers, all without a word. Here torch converts, and arithmetic on bfloat16 runs in float32
and rounds back.

Not repaired: bfloat16 reductions and atomics. Kernels convert to float32 first, which is better numerics anyway.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

FLOATS = {
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float32: torch.float32,
    tl.float64: torch.float64,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
    tl.float8e4b8: torch.float8_e4m3fnuz,
    tl.float8e5b16: torch.float8_e5m2fnuz,
}
_BITS = {1: (np.uint8, torch.uint8), 2: (np.int16, torch.int16), 4: (np.int32, torch.int32), 8: (np.int64, torch.int64)}


def repair() -> None:
    """Patch the interpreter of this process, once."""
    if getattr(InterpreterBuilder, "_repaired", False):
        return
    InterpreterBuilder._repaired = True
    _repair_casts()
    _repair_dot()
    _repair_arithmetic()
    _repair_integer_casts()


def to_torch(data: np.ndarray, dtype: Any) -> Tensor:
    """The interpreter's array of bit patterns as a torch tensor of the element type it stands for."""
    array = np.ascontiguousarray(data)
    return torch.from_numpy(array.view(_BITS[array.dtype.itemsize][0]).copy()).view(FLOATS[dtype])


def to_numpy(values: Tensor, dtype: Any) -> np.ndarray:
    """Inverse of ``to_torch``."""
    bits = values.contiguous().view(_BITS[values.element_size()][1]).numpy()
    return bits.view(interpreter._get_np_dtype(dtype)).copy()


def _convert(data: np.ndarray, source: Any, target: Any) -> np.ndarray:
    return to_numpy(to_torch(data, source).to(FLOATS[target]), target)


def _is_narrow(dtype: Any) -> bool:
    return dtype == tl.bfloat16 or (dtype.is_floating() and dtype.primitive_bitwidth == 8)


def _repair_casts() -> None:
    original_convert, original_cast = interpreter._convert_float, InterpreterBuilder.cast_impl

    def convert_float(data: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
        if source.scalar in FLOATS and target.scalar in FLOATS:
            return _convert(data, source.scalar, target.scalar)
        return original_convert(data, source, target, rounding)

    def cast(self: InterpreterBuilder, handle: TensorHandle, dtype: Any) -> TensorHandle:
        source, target = handle.dtype.scalar, dtype.scalar
        both = source in FLOATS and target in FLOATS and source != target
        if both and (_is_narrow(source) or _is_narrow(target)):
            return TensorHandle(_convert(handle.data, source, target), target)
        return original_cast(self, handle, dtype)

    interpreter._convert_float = convert_float
    for name in ("cast_impl", "create_fp_ext", "create_fp_trunc"):
        setattr(InterpreterBuilder, name, cast)


def _widen(handle: TensorHandle) -> np.ndarray:
    return to_torch(handle.data, handle.dtype.scalar).float().numpy()


def _repair_dot() -> None:
    original = InterpreterBuilder.create_dot

    def create_dot(
        self: InterpreterBuilder, a: TensorHandle, b: TensorHandle, d: TensorHandle, *rest: Any
    ) -> TensorHandle:
        if _is_narrow(a.dtype.scalar):
            product = np.matmul(_widen(a), _widen(b), dtype=np.float32)
            return TensorHandle(product.astype(d.data.dtype) + d.data, d.dtype.scalar)
        return original(self, a, b, d, *rest)

    InterpreterBuilder.create_dot = create_dot


def _is_bfloat16(value: Any) -> bool:
    return isinstance(value, TensorHandle) and value.dtype.scalar == tl.bfloat16


def _repair_arithmetic() -> None:
    for name in ("binary_op", "unary_op", "ternary_op"):
        setattr(InterpreterBuilder, name, _through_float32(getattr(InterpreterBuilder, name)))


def _through_float32(original: Any) -> Any:
    def operation(self: InterpreterBuilder, *args: Any) -> TensorHandle:
        if not any(_is_bfloat16(value) for value in args):
            return original(self, *args)
        widened = [TensorHandle(_widen(value), tl.float32) if _is_bfloat16(value) else value for value in args]
        result = original(self, *widened)
        if result.dtype.scalar != tl.float32:
            return result
        values = torch.from_numpy(np.ascontiguousarray(result.data, dtype=np.float32))
        return TensorHandle(to_numpy(values.bfloat16(), tl.bfloat16), tl.bfloat16)

    return operation


def _repair_integer_casts() -> None:
    for name in ("create_si_to_fp", "create_ui_to_fp"):
        setattr(InterpreterBuilder, name, _integer_cast(getattr(InterpreterBuilder, name)))


def _integer_cast(original: Any) -> Any:
    def cast(self: InterpreterBuilder, handle: TensorHandle, dtype: Any) -> TensorHandle:
        if dtype.scalar != tl.bfloat16:
            return original(self, handle, dtype)
        values = torch.from_numpy(np.ascontiguousarray(handle.data).astype(np.float64))
        return TensorHandle(to_numpy(values.bfloat16(), tl.bfloat16), tl.bfloat16)

    return cast
