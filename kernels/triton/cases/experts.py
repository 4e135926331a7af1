"""Mixtures of experts: routing, and sorting the choices by expert."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .. import moe_align, moe_route
from .case import DTYPES, TYPE_NAMES, Case

# Experts, choices, groups and eligible groups: Mixtral, Qwen3, DeepSeek V2 and V3.
_ROUTERS = ((8, 2, 1, 1), (128, 8, 1, 1), (160, 6, 8, 3), (256, 8, 8, 4), (512, 10, 1, 1))


def cases(arch: str) -> Iterator[Case]:
    """Every kernel of a mixture of experts."""
    yield from _route_cases()
    yield from _align_cases(arch)


def _route_cases() -> Iterator[Case]:
    for dtype in DTYPES:
        for experts, top_k, groups, top_groups in _ROUTERS if dtype is not torch.float16 else _ROUTERS[-2:-1]:
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
                ones=("num_tokens",),
                in_subset=dtype is torch.float32 and experts == 256,
            )


def _align_cases(arch: str) -> Iterator[Case]:
    tables = {"ids_ptr": "*i32", "counts_ptr": "*i32", "totals_ptr": "*i32", "order_ptr": "*i32", "blocks_ptr": "*i32"}
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
