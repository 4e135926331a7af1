"""The packed matmul, the sum over its splits, and the dequantizer."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from .. import dequantize, packed_linear
from ..launch_table import Refused, linear_row
from ..unpack import codes_per_unit
from .case import DTYPES, TYPE_NAMES, Case


def cases(arch: str) -> Iterator[Case]:
    """Every launch row and dtype; widths, groups, zeros and act-order; the sum over splits; the dequantizer."""
    for dtype in DTYPES:
        for num_rows, bits in itertools.product((16, 64, 256), _widths(dtype)):
            for group, zeros in ((128, False), (32, True)):
                if dtype is not torch.float16 or not zeros:
                    yield _linear_case(arch, dtype, num_rows, bits, group, zeros=zeros)
        yield _linear_case(arch, dtype, 16, 4, 36, zeros=True, perm=True)
        for num_rows, group in ((16, 32), (256, 128)):
            yield _linear_case(arch, dtype, num_rows, 4, group, zeros=True, offsets=True)
        yield Case(
            op="add_splits",
            variant=TYPE_NAMES[dtype],
            kernel=packed_linear.add_splits_kernel,
            types={"parts_ptr": "*fp32", "bias_ptr": f"*{TYPE_NAMES[dtype]}", "out_ptr": f"*{TYPE_NAMES[dtype]}"},
            constants={"HAS_BIAS": True, "BLOCK": packed_linear.REDUCE_BLOCK},
            options={"num_warps": 4},
            in_subset=dtype is torch.bfloat16,
        )
    yield from _dequantize_cases()


def _widths(dtype: torch.dtype) -> tuple[int, ...]:
    """Every width in bfloat16; in the other types unpacking is the same and 4 bits stand for all."""
    return (2, 3, 4, 8) if dtype is torch.bfloat16 else (4,)


def _stream_types(bits: int, zeros: str = "*u8") -> dict[str, str]:
    types = {"stream_ptr": "*u8" if bits == 3 else "*i32", "scales_ptr": "*fp16", "zeros_ptr": zeros}
    return {**types, "perm_ptr": "*i32"}


def _linear_case(
    arch: str,
    dtype: torch.dtype,
    num_rows: int,
    bits: int,
    group: int,
    *,
    zeros: bool,
    perm: bool = False,
    offsets: bool = False,
) -> Case:
    """Few rows: split K with a float32 result; otherwise a bias and the result in x's dtype."""
    name = TYPE_NAMES[dtype]
    launch = linear_row(arch, num_rows, dtype.itemsize)
    kind = "offset" if offsets else "asym" if zeros else "sym"
    scheme = f"w{bits}g{group} {kind}{' act-order' if perm else ''}"
    variant = f"{scheme} {num_rows} rows {name}"
    if isinstance(launch, Refused):
        return Case(op="packed_linear", variant=variant, refused=launch.reason)
    split = num_rows <= 16
    flags = {"HAS_ZEROS": zeros, "HAS_PERM": perm, "HAS_BIAS": not split, "SPLIT": split}
    out = "*fp32" if split else f"*{name}"
    return Case(
        op="packed_linear",
        variant=variant,
        kernel=packed_linear.packed_linear_kernel,
        types={
            "x_ptr": f"*{name}",
            "bias_ptr": f"*{name}",
            "out_ptr": out,
            **_stream_types(bits, "*fp16" if offsets else "*u8"),
        },
        constants={**packed_linear.constants(launch, bits, codes_per_unit(bits), group), **flags},
        options={"num_warps": launch.num_warps, "num_stages": launch.num_stages, **launch.options},
        needs_matrix=dtype is not torch.float32,
        ones=("num_rows", "steps_per_split"),
        in_subset=dtype is torch.bfloat16
        and bits == 4
        and not perm
        and not (offsets and num_rows > 16)
        and (zeros or num_rows == 16),
    )


def _dequantize_cases() -> Iterator[Case]:
    for dtype in DTYPES:
        groups = (128, 36) if dtype is torch.bfloat16 else (36,)
        yield from (_dequantize_case(dtype, bits, group) for bits in _widths(dtype) for group in groups)


def _dequantize_case(dtype: torch.dtype, bits: int, group: int) -> Case:
    types = {"out_ptr": f"*{TYPE_NAMES[dtype]}", **_stream_types(bits)}
    del types["perm_ptr"]
    return Case(
        op="dequantize",
        variant=f"w{bits}g{group} {TYPE_NAMES[dtype]}",
        kernel=dequantize.dequantize_kernel,
        types=types,
        constants={**dequantize.constants(bits, codes_per_unit(bits), group), "HAS_ZEROS": True},
        options={"num_warps": 4},
        ones=("num_outputs",),
        in_subset=dtype is torch.bfloat16 and bits == 4 and group == 128,
    )
