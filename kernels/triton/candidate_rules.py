"""What the registrations of Triton kernels share: lazy imports, and why no kernel runs on a device."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from ...platforms.spec import DeviceSpec
from ..problems import dtype_name
from ..registry import Candidate, Quality

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Lazy:
    """A function of a sibling module, imported at its first call."""

    def __init__(self, module: str, name: str) -> None:
        self._module, self._name = module, name
        self._function: Callable[..., Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._function is None:
            self._function = getattr(importlib.import_module(f".{self._module}", __package__), self._name)
        return self._function(*args, **kwargs)


def triton_candidate(
    op: str,
    can_run: Callable[[DeviceSpec, Any], str | None],
    run: Callable[..., Any],
    prepare: Callable[..., Any] | None = None,
) -> Candidate:
    """The Triton candidate of an operation."""
    return Candidate(op=op, name="triton", quality=Quality.NATIVE, can_run=can_run, run=run, prepare=prepare)


def why_not_here(spec: DeviceSpec, *dtypes: torch.dtype) -> str | None:
    """No triton, no GPU, or a dtype without kernels."""
    if not spec.has_triton:
        return "triton is not installed"
    if spec.device_type != "cuda":
        return f"Triton compiles for GPUs, not for {spec.arch}"
    return next((f"no Triton kernel for {dtype_name(dtype)}" for dtype in dtypes if dtype not in DTYPES), None)


def why_no_matrix(spec: DeviceSpec, dtype: torch.dtype) -> str | None:
    """A GPU without the matrix instructions that ``tl.dot`` needs."""
    if "bf16" in spec.matrix_dtypes:
        return None
    return f"{spec.arch} has no bfloat16 matrix instructions; the kernels are checked from sm_80 and gfx90a on"
