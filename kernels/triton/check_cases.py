"""What the ahead-of-time check compiles: every kernel, dtype and launch row, specialized as the launchers do."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from . import activations, dequantize, packed_linear, paged_attention, rms_norm, rope, write_kv
from .launch_table import Refused, attention_row, linear_row, row_launch
from .unpack import codes_per_unit

TYPE_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HEAD_SIZES = (64, 80, 128, 256)
GROUP = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One specialization. ``types`` of the run-time arguments that are neither ``x``'s dtype nor int32; ``refused``
    instead of a compilation when the launch table says why the registry will not choose it on this architecture."""

    op: str
    variant: str
    kernel: Any = None
    types: dict[str, str] = field(default_factory=dict)
    constants: dict[str, Any] = field(default_factory=dict)
    options: dict[str, int] = field(default_factory=dict)
    needs_matrix: bool = False
    in_subset: bool = False
    refused: str | None = None

    @property
    def name(self) -> str:
        return f"{self.op} {self.variant}"


def cases(arch: str) -> Iterator[Case]:
    """Every case of an architecture."""
    yield from _row_cases(arch)
    yield from _attention_cases(arch)
    yield from _linear_cases(arch)
    yield from _dequantize_cases()
    yield from _single_cases(arch)


def _row_cases(arch: str) -> Iterator[Case]:
    for dtype in DTYPES:
        yield from _norm_cases(arch, dtype)
        yield from _plain_cases(arch, dtype)


def _norm_cases(arch: str, dtype: torch.dtype) -> Iterator[Case]:
    name = TYPE_NAMES[dtype]
    pointers = {f"{part}_ptr": f"*{name}" for part in ("x", "residual", "weight", "out", "new_residual")}
    for columns, add in itertools.product((128, 4096, 8192, 20480), (False, True)):
        launch = row_launch(arch, columns)
        yield Case(
            op="add_rms_norm" if add else "rms_norm",
            variant=f"K={columns} {name}",
            kernel=rms_norm.rms_norm_kernel,
            types={**pointers, "eps": "fp32", "offset": "fp32"},
            constants={**rms_norm.constants(columns, launch), "ADD": add},
            options={"num_warps": launch.num_warps},
            in_subset=dtype is torch.bfloat16 and columns == 8192,
        )


def _plain_cases(arch: str, dtype: torch.dtype) -> Iterator[Case]:
    name, subset = TYPE_NAMES[dtype], dtype is torch.bfloat16
    for interleaved, rotary in itertools.product((False, True), (64, 128)):
        yield Case(
            op="rope",
            variant=f"R={rotary} {'interleaved' if interleaved else 'neox'} {name}",
            kernel=rope.rope_kernel,
            types={"q_ptr": f"*{name}", "k_ptr": f"*{name}", "cos_sin_ptr": "*fp32", "positions_ptr": "*i64"},
            constants=rope.constants(rotary, interleaved),
            options={"num_warps": row_launch(arch, 1).num_warps},
            in_subset=subset and rotary == 128,
        )
    for activation in ("silu", "gelu", "gelu_tanh"):
        yield Case(
            op="act_and_mul",
            variant=f"{activation} {name}",
            kernel=activations.act_and_mul_kernel,
            types={"x_ptr": f"*{name}", "out_ptr": f"*{name}"},
            constants=activations.constants(activation),
            options={"num_warps": row_launch(arch, 1024).num_warps},
            in_subset=subset,
        )
    for head_size in (64, 80, 256):
        caches = {f"{part}_ptr": f"*{name}" for part in ("key", "value", "key_cache", "value_cache")}
        yield Case(
            op="write_kv",
            variant=f"D={head_size} {name}",
            kernel=write_kv.write_kv_kernel,
            types={**caches, "slot_mapping_ptr": "*i64"},
            constants={**write_kv.constants(head_size), "kc_dim_stride": 1, "vc_dim_stride": 1},
            options={"num_warps": row_launch(arch, 1024).num_warps},
            in_subset=subset and head_size == 80,
        )


def _attention_cases(arch: str) -> Iterator[Case]:
    for dtype, phase, head_size in itertools.product(DTYPES, ("decode", "prefill"), HEAD_SIZES):
        if head_size != 80 or dtype is torch.bfloat16:
            yield _attention_case(arch, dtype, phase, head_size, extras=False)
        if head_size in (128, 256) and dtype is not torch.float16:
            yield _attention_case(arch, dtype, phase, head_size, extras=True)
    for cache in ("fp16", "fp32"):
        case = _attention_case(arch, torch.bfloat16, "decode", 128, extras=False)
        types = {**case.types, "key_ptr": f"*{cache}", "value_ptr": f"*{cache}"}
        yield replace(case, variant=f"{case.variant}, cache {cache}", types=types, in_subset=False)
    for dtype in DTYPES:
        yield Case(
            op="reduce_splits",
            variant=f"D=128 {TYPE_NAMES[dtype]}",
            kernel=paged_attention.reduce_splits_kernel,
            types={"partial_ptr": "*fp32", "stats_ptr": "*fp32", "out_ptr": f"*{TYPE_NAMES[dtype]}"},
            constants=paged_attention.reduce_constants(128, paged_attention.MAX_SPLITS),
            options={"num_warps": 4},
            in_subset=dtype is torch.bfloat16,
        )


def _attention_case(arch: str, dtype: torch.dtype, phase: str, head_size: int, *, extras: bool) -> Case:
    """``extras``: sliding window and soft cap, and for decode a single token per request with split contexts."""
    name = TYPE_NAMES[dtype]
    launch = attention_row(arch, phase, head_size, dtype.itemsize)
    variant = f"{phase} D={head_size} {name}" + (" window, cap" if extras else "")
    if isinstance(launch, Refused):
        return Case(op="paged_attention", variant=variant, refused=launch.reason)
    decode = phase == "decode"
    flags = {"ONE_TOKEN": decode, "HAS_WINDOW": extras, "HAS_SOFT_CAP": extras, "SPLIT": decode and extras}
    pointers = {f"{part}_ptr": f"*{name}" for part in ("q", "key", "value", "out")}
    pointers |= {f"{part}_ptr": "*i32" for part in ("block_table", "query_start_loc", "seq_lens")}
    split = "*fp32" if decode and extras else f"*{name}"
    return Case(
        op="paged_attention",
        variant=variant,
        kernel=paged_attention.paged_attention_kernel,
        types={**pointers, "partial_ptr": split, "stats_ptr": split, "scale": "fp32", "soft_cap": "fp32"},
        constants={
            **paged_attention.constants(launch, GROUP, head_size, 16),
            **flags,
            "k_dim_stride": 1,
            "v_dim_stride": 1,
        },
        options={"num_warps": launch.num_warps, "num_stages": launch.num_stages, **launch.options},
        needs_matrix=dtype is not torch.float32,
        in_subset=dtype is torch.bfloat16 and head_size in (64, 128) and extras == (head_size == 128),
    )


def _linear_cases(arch: str) -> Iterator[Case]:
    for dtype in DTYPES:
        for num_rows, bits in itertools.product((16, 64, 256), _widths(dtype)):
            for group, zeros in ((128, False), (32, True)):
                yield _linear_case(arch, dtype, num_rows, bits, group, zeros=zeros)
        yield _linear_case(arch, dtype, 16, 4, 36, zeros=True, perm=True)
        yield Case(
            op="add_splits",
            variant=TYPE_NAMES[dtype],
            kernel=packed_linear.add_splits_kernel,
            types={"parts_ptr": "*fp32", "bias_ptr": f"*{TYPE_NAMES[dtype]}", "out_ptr": f"*{TYPE_NAMES[dtype]}"},
            constants={"HAS_BIAS": True, "BLOCK": packed_linear.REDUCE_BLOCK},
            options={"num_warps": 4},
            in_subset=dtype is torch.bfloat16,
        )


def _widths(dtype: torch.dtype) -> tuple[int, ...]:
    """Every width in bfloat16; in the other types unpacking is the same and 4 bits stand for all."""
    return (2, 3, 4, 8) if dtype is torch.bfloat16 else (4,)


def _stream_types(bits: int) -> dict[str, str]:
    types = {"stream_ptr": "*u8" if bits == 3 else "*i32", "scales_ptr": "*fp16", "zeros_ptr": "*u8"}
    return {**types, "perm_ptr": "*i32"}


def _linear_case(
    arch: str, dtype: torch.dtype, num_rows: int, bits: int, group: int, *, zeros: bool, perm: bool = False
) -> Case:
    """Few rows: split K with a float32 result; otherwise a bias and the result in x's dtype."""
    name = TYPE_NAMES[dtype]
    launch = linear_row(arch, num_rows, dtype.itemsize)
    scheme = f"w{bits}g{group} {'asym' if zeros else 'sym'}{' act-order' if perm else ''}"
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
        types={"x_ptr": f"*{name}", "bias_ptr": f"*{name}", "out_ptr": out, **_stream_types(bits)},
        constants={**packed_linear.constants(launch, bits, codes_per_unit(bits), group), **flags},
        options={"num_warps": launch.num_warps, "num_stages": launch.num_stages, **launch.options},
        needs_matrix=dtype is not torch.float32,
        in_subset=dtype is torch.bfloat16 and bits == 4 and not perm and (zeros or num_rows == 16),
    )


def _dequantize_cases() -> Iterator[Case]:
    for dtype in DTYPES:
        yield from (_dequantize_case(dtype, bits, group) for bits in _widths(dtype) for group in (128, 36))


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
        in_subset=dtype is torch.bfloat16 and bits == 4 and group == 128,
    )


# Integers that are 1 in the smallest launches: one request, one row, one head. The JIT makes constants of ones.
_ONES = {
    "rms_norm": ("num_rows", "inner"),
    "rope": ("num_heads", "num_kv_heads"),
    "write_kv": ("num_kv_heads", "block_size"),
    "paged_attention": ("num_requests", "num_heads", "table_stride", "window"),
    "packed_linear": ("num_rows", "steps_per_split"),
    "dequantize": ("num_outputs",),
}


def _single_cases(arch: str) -> Iterator[Case]:
    """Of each kernel in the subset a bfloat16 case with every such integer one."""
    seen = set()
    for case in [*_row_cases(arch), *_attention_cases(arch), *_linear_cases(arch), *_dequantize_cases()]:
        kind = case.op, case.constants.get("ONE_TOKEN")
        if case.in_subset and case.op in _ONES and kind not in seen and case.refused is None:
            seen.add(kind)
            ones = dict.fromkeys(_ONES[case.op], 1)
            yield replace(case, variant=f"{case.variant}, ones", constants={**case.constants, **ones}, in_subset=False)
