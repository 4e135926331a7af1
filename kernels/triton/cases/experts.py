"""Mixtures of experts: routing, sorting the choices by expert, the products, the weighted sum."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from ....platforms.arch_spec import spec_of_arch
from ....platforms.fp8 import fp8_dtype
from ....platforms.spec import Fp8Kind
from .. import expert_dense, expert_packed, expert_scaled, expert_sum, moe_align, moe_route
from ..launch_experts import dense_row
from ..launch_scaled import scaled_row
from ..launch_table import LinearLaunch, Refused, linear_row
from ..packed_linear import constants as packed_constants
from ..unpack import codes_per_unit
from .case import DTYPES, TYPE_NAMES, Case

_ROWS_PER_EXPERT = (16, 64, 256)
# Experts, choices, groups and eligible groups: Mixtral, Qwen3, DeepSeek V2 and V3.
_CODES = {
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e4m3fnuz: "fp8e4b8",
    torch.bfloat16: "bf16",
}
_FEATURES = 2048
_TABLES = {f"{name}_ptr": "*i32" for name in ("ids", "order", "blocks")}
_ROUTERS = ((8, 2, 1, 1), (128, 8, 1, 1), (160, 6, 8, 3), (256, 8, 8, 4), (512, 10, 1, 1))


def cases(arch: str) -> Iterator[Case]:
    """Every kernel of a mixture of experts."""
    yield from _route_cases()
    yield from _align_cases(arch)
    for dtype in DTYPES:
        for count in _ROWS_PER_EXPERT:
            yield _dense_case(arch, dtype, count)
            yield _packed_case(arch, dtype, count, 4, 128)
        yield _sum_case(dtype)
    for bits, group in ((2, 128), (3, 128), (4, 32), (8, 128)):
        for count in _ROWS_PER_EXPERT:
            yield _packed_case(arch, torch.bfloat16, count, bits, group, zeros=True, perm=group == 32)
    kind = spec_of_arch(arch).fp8
    pairs = [(torch.int8, torch.int8), (torch.bfloat16, torch.uint8)]
    pairs += [] if kind is Fp8Kind.NONE else [(fp8_dtype(kind), fp8_dtype(kind))]
    for (x, weight), count, common in itertools.product(pairs, _ROWS_PER_EXPERT, (_FEATURES, 128)):
        yield _scaled_case(arch, x, weight, count, common)


def _route_cases() -> Iterator[Case]:
    for dtype in DTYPES:
        for experts, top_k, groups, top_groups in _ROUTERS if dtype is torch.float32 else _ROUTERS[-2:-1]:
            sigmoid = experts == 256
            yield Case(
                op="moe_route",
                variant=f"{top_k} of {experts}{f' in {groups} groups' * (groups > 1)} {TYPE_NAMES[dtype]}",
                kernel=moe_route.moe_route_kernel,
                types={
                    "logits_ptr": f"*{TYPE_NAMES[dtype]}",
                    "bias_ptr": "*fp32",
                    "weights_ptr": "*fp32",
                    "ids_ptr": "*i32",
                    "scaling": "fp32",
                },
                constants={
                    **moe_route.constants(experts, top_k, groups, top_groups),
                    "SIGMOID": sigmoid,
                    "RENORMALIZE": True,
                    "HAS_BIAS": sigmoid,
                    "TOP2": sigmoid,
                },
                options={"num_warps": 1},
                in_subset=dtype is torch.float32 and experts == 256,
            )


def _align_cases(arch: str) -> Iterator[Case]:
    tables = {**_TABLES, "counts_ptr": "*i32", "totals_ptr": "*i32"}
    for experts in (8, 128, 512):
        bins = moe_align.num_bins(experts)
        yield Case(
            op="count_experts",
            variant=f"E={experts}",
            kernel=moe_align.count_experts_kernel,
            types={"ids_ptr": "*i32", "counts_ptr": "*i32"},
            constants={"BINS": bins, "CHUNK": moe_align.CHUNK},
            options={"num_warps": 1},
            in_subset=experts == 128,
        )
        yield Case(
            op="sum_chunks",
            variant=f"E={experts}",
            kernel=moe_align.sum_chunks_kernel,
            types={"counts_ptr": "*i32", "totals_ptr": "*i32"},
            constants=moe_align.sum_constants(experts),
            options={"num_warps": 4},
            in_subset=experts == 128,
        )
        for single in (True, False):
            yield Case(
                op="place_choices",
                variant=f"E={experts}{' one chunk' * single}",
                kernel=moe_align.place_choices_kernel,
                types=tables,
                constants=moe_align.place_constants(experts, 16, single),
                options={"num_warps": moe_align.place_warps(arch)},
                ones=("num_experts",),
                in_subset=experts == 128,
            )


def _dense_case(arch: str, dtype: torch.dtype, count: int) -> Case:
    name = TYPE_NAMES[dtype]
    launch = dense_row(arch, count, dtype.itemsize)
    if isinstance(launch, Refused):
        return Case(op="dense_experts", variant=f"{count} rows {name}", refused=launch.reason)
    return Case(
        op="dense_experts",
        variant=f"{count} rows {name}",
        kernel=expert_dense.dense_experts_kernel,
        types={f"{part}_ptr": f"*{name}" for part in ("x", "weight", "out")} | _TABLES,
        constants=expert_dense.constants(launch, aligned=True),
        options=_options(launch),
        ones=("num_experts", "choices_per_row"),
        needs_matrix=dtype is not torch.float32,
        in_subset=dtype is torch.bfloat16,
    )


def _packed_case(
    arch: str, dtype: torch.dtype, count: int, bits: int, group: int, *, zeros: bool = False, perm: bool = False
) -> Case:
    name = TYPE_NAMES[dtype]
    launch = linear_row(arch, count, dtype.itemsize)
    variant = f"w{bits}g{group}{' asym' * zeros}{' act-order' * perm} {count} rows {name}"
    if isinstance(launch, Refused):
        return Case(op="packed_experts", variant=variant, refused=launch.reason)
    stream = {
        "stream_ptr": "*u8" if bits == 3 else "*i32",
        "scales_ptr": "*fp16",
        "zeros_ptr": "*u8",
        "perm_ptr": "*i32",
    }
    return Case(
        op="packed_experts",
        variant=variant,
        kernel=expert_packed.packed_experts_kernel,
        types={"x_ptr": f"*{name}", "out_ptr": f"*{name}", **stream, **_TABLES},
        constants={
            **packed_constants(launch, bits, codes_per_unit(bits), group),
            "ALIGNED": count > 16,
            "HAS_ZEROS": zeros,
            "HAS_PERM": perm,
        },
        options=_options(launch),
        ones=("num_experts", "choices_per_row", "num_groups"),
        needs_matrix=dtype is not torch.float32,
        in_subset=dtype is torch.bfloat16 and bits == 4 and not perm,
    )


def _scaled_case(arch: str, x: torch.dtype, weight: torch.dtype, count: int, common: int) -> Case:
    launch = scaled_row(arch, count, x.itemsize, grouped=common < _FEATURES)
    variant = f"{_CODES[x]} x {_CODES[weight]} {'whole' if common == _FEATURES else f'g{common}'} {count} rows"
    if isinstance(launch, Refused):
        return Case(op="scaled_experts", variant=variant, refused=launch.reason)
    return Case(
        op="scaled_experts",
        variant=variant,
        kernel=expert_scaled.scaled_experts_kernel,
        types={
            "x_ptr": f"*{_CODES[x]}",
            "codes_ptr": f"*{_CODES[weight]}",
            **{f"{part}_ptr": "*fp32" for part in ("x_scale", "scales")},
            **{f"{part}_ptr": "*i32" for part in ("x_zero", "zeros", "sums")},
            "out_ptr": "*bf16",
            **_TABLES,
        },
        constants={
            **expert_scaled.scaled_constants(launch, weight, _FEATURES, common, aligned=True),
            "X_SCALED": x.itemsize == 1,
            "X_ZEROS": False,
            "W_ZEROS": False,
        },
        options=_options(launch),
        ones=("num_experts", "choices_per_row", "scale_rows", "group"),
        needs_matrix=True,
        in_subset=common == 128 and count == 16,
    )


def _sum_case(dtype: torch.dtype) -> Case:
    name = TYPE_NAMES[dtype]
    return Case(
        op="sum_experts",
        variant=name,
        kernel=expert_sum.sum_experts_kernel,
        types={"rows_ptr": f"*{name}", "weights_ptr": "*fp32", "out_ptr": f"*{name}"},
        constants={"BLOCK": expert_sum.BLOCK},
        options={"num_warps": 4},
        ones=("top_k",),
        in_subset=dtype is torch.bfloat16,
    )


def _options(launch: LinearLaunch) -> dict[str, int]:
    return {"num_warps": launch.num_warps, "num_stages": launch.num_stages, **launch.options}
