"""The scaled matmul and the quantization of its inputs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from ....platforms.arch_spec import spec_of_arch
from ....platforms.spec import Fp8Kind
from ....quant.scheme import Activation, Element
from ...quantized_input import InputFormat
from .. import quantize_rows, scaled_linear
from ..launch_scaled import scaled_row
from ..launch_table import Refused
from .case import DTYPES, TYPE_NAMES, Case

FEATURES = 4096
CODE_NAMES = {
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e4m3fnuz: "fp8e4b8",
    **TYPE_NAMES,
}
_NATIVE = {Fp8Kind.OCP: torch.float8_e4m3fn, Fp8Kind.FNUZ: torch.float8_e4m3fnuz}


def cases(arch: str) -> Iterator[Case]:
    """Products of the codes that the architecture multiplies, products with decoded weights, quantization."""
    fp8 = _NATIVE.get(spec_of_arch(arch).fp8)
    pairs = [(torch.int8, torch.int8)] + ([] if fp8 is None else [(fp8, fp8)])
    for (x, weight), num_rows, common in itertools.product(pairs, (16, 64, 256), (FEATURES, 128)):
        yield _linear_case(arch, x, weight, num_rows, common)
    yield _linear_case(arch, torch.int8, torch.int8, 16, FEATURES, zeros=True)
    yield _linear_case(arch, torch.int8, torch.int8, 256, 32, zeros=True)
    yield _linear_case(arch, torch.int8, torch.int8, 64, 48, even=False)
    if fp8 is not None:
        yield _linear_case(arch, fp8, fp8, 256, 32)
    for dtype, num_rows, common in itertools.product(DTYPES, (16, 64, 256), (FEATURES, 128)):
        if dtype is not torch.float16 or common == FEATURES:
            yield _linear_case(arch, dtype, torch.uint8, num_rows, common)
    yield from _quantize_cases(arch, fp8)


def _linear_case(
    arch: str,
    x: torch.dtype,
    weight: torch.dtype,
    num_rows: int,
    common: int,
    *,
    zeros: bool = False,
    even: bool = True,
) -> Case:
    """Few rows: split K with a float32 result; otherwise a bias and the result in bfloat16, or in x's float."""
    launch = scaled_row(arch, num_rows, x.itemsize, grouped=common < FEATURES, corrected=zeros and common < FEATURES)
    grain = "whole" if common == FEATURES else f"g{common}"
    names = f"{CODE_NAMES[x]} x {CODE_NAMES[weight]}"
    variant = f"{names} {grain}{' zeros' if zeros else ''} {num_rows} rows"
    if isinstance(launch, Refused):
        return Case(op="scaled_linear", variant=variant, refused=launch.reason)
    split = num_rows <= 16
    out = "bf16" if x.itemsize == 1 else TYPE_NAMES[x]
    values = scaled_linear.constants(launch, weight, FEATURES, common)
    scaled = x.itemsize == 1 or common == FEATURES
    return Case(
        op="scaled_linear",
        variant=variant,
        kernel=scaled_linear.scaled_linear_kernel,
        types={
            "x_ptr": f"*{CODE_NAMES[x]}",
            "codes_ptr": f"*{CODE_NAMES[weight]}",
            **{f"{part}_ptr": "*fp32" for part in ("x_scale", "scales")},
            **{f"{part}_ptr": "*i32" for part in ("x_zero", "zeros", "sums")},
            "bias_ptr": f"*{out}",
            "out_ptr": "*fp32" if split else f"*{out}",
        },
        constants={
            **values,
            "EVEN_K": values["EVEN_K"] and even,
            "X_SCALED": scaled,
            "X_ZEROS": zeros,
            "W_ZEROS": zeros,
            "HAS_BIAS": not split,
            "SPLIT": split,
        },
        options={"num_warps": launch.num_warps, "num_stages": launch.num_stages, **launch.options},
        needs_matrix=x is not torch.float32,
        ones=("num_rows", "steps_per_split", "scale_rows"),
        in_subset=not zeros and even and x in (torch.int8, torch.bfloat16, *_NATIVE.values()) and num_rows in (16, 256),
    )


def _quantize_cases(arch: str, fp8: torch.dtype | None) -> Iterator[Case]:
    int8, kind = Activation(Element.INT8), fp8 or torch.bfloat16
    ways = (
        (int8, torch.int8),
        (Activation(Element.INT8, symmetric=False), torch.int8),
        (Activation(Element.FP8), kind),
        (Activation(Element.FP8, 128), kind),
        (Activation(Element.FP8, 0, dynamic=False), kind),
        (Activation(Element.FP8, 32, power_of_two=True), kind),
    )
    for how, codes in ways:
        for source, columns in itertools.product(("plain", "norm", "add_norm", "silu"), (576, 8192, 28672)):
            # The lengths of a row have launch settings of their own, the grains have not: one way stands for all.
            if columns != 8192 and (how, codes) not in (ways[1], ways[3]):
                continue
            yield _quantize_case(arch, how, codes, source, columns, torch.bfloat16)
    for source in ("gelu", "gelu_tanh"):
        yield _quantize_case(arch, int8, torch.int8, source, 8192, torch.bfloat16)
    for dtype, columns in ((torch.float16, 8192), (torch.float32, 576), (torch.float32, 8192), (torch.float32, 28672)):
        yield _quantize_case(arch, ways[2][0], kind, "add_norm", columns, dtype)
    yield _quantize_case(arch, Activation(Element.INT8, 0), torch.int8, "plain", 8192, torch.bfloat16)
    yield Case(
        op="range",
        variant="bf16",
        kernel=quantize_rows.range_kernel,
        types={"x_ptr": "*bf16", "range_ptr": "*fp32", "size": "i64"},
        constants={"BLOCK": quantize_rows.RANGE_BLOCK},
        options={"num_warps": 8},
        ones=("blocks_per_program",),
        in_subset=True,
    )


def _quantize_case(
    arch: str, how: Activation, codes: torch.dtype, source: str, columns: int, dtype: torch.dtype
) -> Case:
    scalar = torch.ones(())
    wanted = InputFormat(how, codes, None if how.dynamic else scalar)
    values, num_warps = quantize_rows.constants(columns, wanted, source, arch)
    pointers = {f"{part}_ptr": f"*{TYPE_NAMES[dtype]}" for part in ("x", "residual", "weight", "new_residual")}
    floats = {f"{part}_ptr": "*fp32" for part in ("scale", "static_scale", "static_zero", "range")}
    return Case(
        op="quantize_rows",
        variant=f"{source} {how} {CODE_NAMES[codes]} K={columns} {TYPE_NAMES[dtype]}",
        kernel=quantize_rows.quantize_rows_kernel,
        types={
            **pointers,
            **floats,
            "codes_ptr": f"*{CODE_NAMES[codes]}",
            "zero_ptr": "*i32",
            "eps": "fp32",
            "offset": "fp32",
        },
        constants=values,
        options={"num_warps": num_warps},
        ones=("num_rows",),
        in_subset=columns == 8192 and dtype is torch.bfloat16 and _stands_for_others(how, source),
    )


def _stands_for_others(how: Activation, source: str) -> bool:
    """For continuous integration: every source once, and every grain once."""
    if how.element is Element.INT8:
        return source == "plain" and how.group_size == -1 and not how.symmetric
    return source == {-1: "add_norm", 0: "norm", 128: "silu"}.get(how.group_size)
