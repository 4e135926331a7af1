"""The Triton kernels as candidates of the registry. Nothing here imports triton until a kernel runs."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from ...platforms.spec import DeviceSpec
from ...quant.scheme import WeightOnly
from ..problems import AttentionProblem, KVWriteProblem, LinearProblem, PlainProblem, dtype_name
from ..registry import Candidate, Quality, Registry
from .launch_table import Refused, attention_row, linear_row

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
HEAD_SIZES = range(16, 257)
MAX_GROUP = 64
BITS = (2, 3, 4, 8)

_PLAIN_OPS = {
    "rms_norm": "rms_norm",
    "add_rms_norm": "rms_norm",
    "rope": "rope",
    "silu_and_mul": "activations",
    "gelu_and_mul": "activations",
}


class _Lazy:
    """A function of a sibling module, imported at its first call."""

    def __init__(self, module: str, name: str) -> None:
        self._module, self._name = module, name
        self._function: Callable[..., Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._function is None:
            self._function = getattr(importlib.import_module(f".{self._module}", __package__), self._name)
        return self._function(*args, **kwargs)


def register_triton_ops(registry: Registry) -> None:
    """Append the Triton candidate of every operation that has one."""
    for op, module in _PLAIN_OPS.items():
        registry.register(_candidate(op, can_run_plain, _Lazy(module, op)))
    registry.register(_candidate("write_kv", can_run_kv_write, _Lazy("write_kv", "write_kv")))
    registry.register(_candidate("paged_attention", can_run_attention, _Lazy("paged_attention", "paged_attention")))
    run, prepare = _Lazy("packed_linear", "packed_linear"), _Lazy("packed_weight", "prepare")
    registry.register(_candidate("linear", can_run_linear, run, prepare))


def _candidate(
    op: str,
    can_run: Callable[[DeviceSpec, Any], str | None],
    run: Callable[..., Any],
    prepare: Callable[..., Any] | None = None,
) -> Candidate:
    return Candidate(op=op, name="triton", quality=Quality.NATIVE, can_run=can_run, run=run, prepare=prepare)


def _why_not_here(spec: DeviceSpec, *dtypes: torch.dtype) -> str | None:
    if not spec.has_triton:
        return "triton is not installed"
    if spec.device_type != "cuda":
        return f"Triton compiles for GPUs, not for {spec.arch}"
    return next((f"no Triton kernel for {dtype_name(dtype)}" for dtype in dtypes if dtype not in DTYPES), None)


def _why_no_matrix(spec: DeviceSpec, dtype: torch.dtype) -> str | None:
    if "bf16" in spec.matrix_dtypes:
        return None
    return f"{spec.arch} has no bfloat16 matrix instructions; the kernels are checked from sm_80 and gfx90a on"


def can_run_plain(spec: DeviceSpec, problem: PlainProblem) -> str | None:
    """Norms, rotary embedding, activations."""
    return _why_not_here(spec, problem.dtype)


def can_run_kv_write(spec: DeviceSpec, problem: KVWriteProblem) -> str | None:
    """Writes into the cache: both dtypes."""
    return _why_not_here(spec, problem.dtype, problem.kv_dtype)


def can_run_attention(spec: DeviceSpec, problem: AttentionProblem) -> str | None:
    """Paged attention: head size, query heads per KV head, dtypes, and the launch table's refusals."""
    reason = _why_not_here(spec, problem.dtype, problem.kv_dtype) or _why_no_matrix(spec, problem.dtype)
    if reason is not None:
        return reason
    if problem.head_size not in HEAD_SIZES:
        return f"head size {problem.head_size} is not between {HEAD_SIZES.start} and {HEAD_SIZES.stop - 1}"
    group = problem.num_heads // problem.num_kv_heads
    if group * problem.num_kv_heads != problem.num_heads or group > MAX_GROUP:
        heads = f"{problem.num_heads} query heads over {problem.num_kv_heads} KV heads"
        return f"{heads}; at most {MAX_GROUP} may share one, evenly"
    element_size = problem.dtype.itemsize
    rows = (attention_row(spec.arch, phase, problem.head_size, element_size) for phase in ("decode", "prefill"))
    return next((row.reason for row in rows if isinstance(row, Refused)), None)


def can_run_linear(spec: DeviceSpec, problem: LinearProblem) -> str | None:
    """The packed matmul: weight-only schemes of 2, 3, 4 and 8 bits."""
    reason = _why_not_here(spec, problem.dtype) or _why_no_matrix(spec, problem.dtype)
    if reason is not None:
        return reason
    if not isinstance(problem.scheme, WeightOnly):
        return f"the weight is {problem.scheme}, not weight-only quantized"
    if problem.scheme.bits not in BITS:
        return f"{problem.scheme.bits} bits; the packed matmul takes {', '.join(map(str, BITS))}"
    rows = (linear_row(spec.arch, count, problem.dtype.itemsize) for count in (1, 64, 256))
    return next((row.reason for row in rows if isinstance(row, Refused)), None)
