"""Reading scales, codes and static input parameters, whatever shapes and dtypes a tool wrote them in."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from ...errors import CheckpointError, UnsupportedError
from ..canonical import EightBitWeight
from ..scheme import Activation, Fp8, Int8, LowBit, MicroScaled
from .base_source import TensorSource
from .missing import missing

WithActivation = TypeVar("WithActivation", bound=Int8 | Fp8 | LowBit | MicroScaled)
Block = tuple[int, int]


def matrix_shape(source: TensorSource, name: str) -> tuple[int, int]:
    """Shape of a stored matrix; CheckpointError when it is missing or none."""
    if not source.has(name):
        raise CheckpointError(missing(source, name))
    shape = source.shape(name)
    if len(shape) != 2:
        raise CheckpointError(f"{name} in {source.location(name)} is {list(shape)}; it must be a matrix")
    return shape[0], shape[1]


def block_of_scales(source: TensorSource, name: str, shape: tuple[int, int], declared: Block) -> Block:
    """The block (rows, columns) that the shape of stored scales proves for a weight [N, K]."""
    if not source.has(name):
        raise CheckpointError(missing(source, name, "its weight has no meaning without it"))
    stored = source.shape(name)
    if _fits(stored, shape, declared):
        return declared
    rows, columns = shape
    if math.prod(stored) == 1:
        return -1, -1
    if stored in ((rows,), (rows, 1)):
        return 1, -1
    if len(stored) == 2 and stored[0] == rows and stored[1] and columns % stored[1] == 0:
        raise CheckpointError(
            f"{name} in {source.location(name)} has a scale for every {columns // stored[1]} input features; the "
            f"config says {_said(declared)}. Take the config.json that was saved with these weights, or correct it"
        )
    raise CheckpointError(
        f"{name} in {source.location(name)} is {list(stored)}, which fits neither a scale per tensor nor per channel "
        f"of its weight {list(shape)}, nor blocks of {list(declared)} as the config says"
    )


def _said(block: Block) -> str:
    if block[0] == 1:
        return "one for each output feature" if block[1] == -1 else f"group_size {block[1]}"
    return "one for the whole weight" if block == (-1, -1) else f"blocks of {list(block)}"


def _fits(stored: tuple[int, ...], shape: tuple[int, int], block: Block) -> bool:
    scheme = Fp8(block)
    expected = scheme.num_blocks(shape)
    if stored == expected:
        return True
    one_dimensional = len(stored) < 2 and 1 in expected
    return one_dimensional and math.prod(stored) == math.prod(expected)


def read_blocks(source: TensorSource, name: str, shape: tuple[int, int], block: Block) -> Tensor:
    """Stored values, one per block, as a matrix. e8m0 exponents become float32."""
    values = source.get(name)
    if values.dtype is torch.float8_e8m0fnu:
        values = values.float()
    return values.reshape(Fp8(block).num_blocks(shape))


def eight_bit_scheme(
    source: TensorSource, module: str, scheme: Int8 | Fp8, scale_name: str
) -> tuple[Int8 | Fp8, tuple[int, int]]:
    """The scheme with the block that is stored, and (N, K); from headers alone."""
    name = f"{module}.weight"
    shape = matrix_shape(source, name)
    wanted = torch.int8 if isinstance(scheme, Int8) else torch.float8_e4m3fn
    refuse_dtype(source, name, wanted, str(scheme))
    needs_static(source, module, scheme.activation)
    return replace(scheme, block=block_of_scales(source, scale_name, shape, scheme.block)), shape


def read_eight_bit(
    source: TensorSource,
    module: str,
    scheme: Int8 | Fp8,
    scale_name: str,
    scales: Tensor | None = None,
    zero_name: str | None = None,
) -> EightBitWeight:
    """An int8 or fp8 weight. ``scales`` are given where they are stored in a place of their own."""
    shape = matrix_shape(source, f"{module}.weight")
    if scales is None:
        scheme, shape = eight_bit_scheme(source, module, scheme, scale_name)
        scales = read_blocks(source, scale_name, shape, scheme.block)
    zeros = None
    if isinstance(scheme, Int8):
        if zero_name is not None and source.has(zero_name):
            stored = read_blocks(source, zero_name, shape, scheme.block).to(torch.int8)
            zeros = stored if bool(stored.any()) else None
        scheme = replace(scheme, symmetric=zeros is None)
    scheme, input_scale, input_zero = with_static_input(source, module, scheme)
    return EightBitWeight(scheme, source.get(f"{module}.weight"), scales.contiguous(), zeros, input_scale, input_zero)


def refuse_dtype(source: TensorSource, name: str, wanted: torch.dtype, said: str) -> None:
    """UnsupportedError where codes are stored in another type than the one that ``said``, the config's, is read from.

    Read as numbers they would be wrong ones.
    """
    stored = source.dtype(name)
    if stored is not wanted:
        raise UnsupportedError(
            f"{name} in {source.location(name)} is stored as {stored}; the config says {said}, which is served from "
            f"{wanted} weights. Take the config.json that was saved with these weights, or correct it"
        )


def refuse_zeros(source: TensorSource, name: str, zeros: Tensor | None, *, symmetric: bool) -> None:
    """CheckpointError for zero points (None: all are the middle) of weights that the config calls symmetric."""
    if symmetric and zeros is not None:
        raise CheckpointError(
            f"{name} in {source.location(name)} holds zero points that are not the middle; the config says symmetric: "
            f"true. Take the config.json that was saved with these weights, or set symmetric to false"
        )


def needs_static(source: TensorSource, module: str, activation: Activation | None) -> None:
    """CheckpointError when static activations have no stored scale."""
    if activation is None or activation.dynamic:
        return
    name = f"{module}.{static_name(activation)}"
    if not source.has(name):
        raise CheckpointError(
            f"{name} is missing from {source.location(name)}, but the config says that activations of {module} are "
            f"quantized with a stored scale"
        )


def static_name(activation: Activation) -> str:
    """Last name of the stored scale of static activations."""
    return "input_global_scale" if activation.group_size > 0 else "input_scale"


def with_static_input(
    source: TensorSource, module: str, scheme: WithActivation
) -> tuple[WithActivation, Tensor | None, Tensor | None]:
    """The scheme as stored, and the static scale and zero of its input (None where there is none)."""
    activation = scheme.activation
    if activation is None or activation.dynamic:
        return scheme, None, None
    needs_static(source, module, activation)
    scale = _scalar(source, f"{module}.{static_name(activation)}")
    name = f"{module}.input_zero_point"
    zero = _scalar(source, name) if source.has(name) else None
    if zero is not None and not bool(zero.any()):
        zero = None
    return replace(scheme, activation=replace(activation, symmetric=zero is None)), scale, zero


def _scalar(source: TensorSource, name: str) -> Tensor:
    value = source.get(name)
    if value.numel() != 1:
        raise CheckpointError(f"{name} in {source.location(name)} is {list(value.shape)}; it must be one number")
    return value.reshape(()).to(torch.float32)
