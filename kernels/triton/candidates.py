"""The Triton kernels as candidates of the registry. Nothing here imports triton until a kernel runs."""

from __future__ import annotations

from ...platforms.spec import DeviceSpec
from ...quant.scheme import Offset, WeightOnly
from ..problems import LinearProblem, PlainProblem
from ..registry import Registry
from .candidate_rules import Lazy, triton_candidate, why_no_matrix, why_not_here
from .candidates_attention import register_attention_ops
from .candidates_experts import register_expert_ops
from .candidates_lora import register_lora_ops
from .candidates_sampling import register_sampling_ops
from .candidates_scaled import register_scaled_ops
from .launch_table import Refused, linear_row

BITS = (2, 3, 4, 8)

_PLAIN_OPS = {
    "rms_norm": "rms_norm",
    "add_rms_norm": "rms_norm",
    "rope": "rope",
    "silu_and_mul": "activations",
    "gelu_and_mul": "activations",
}


def register_triton_ops(registry: Registry, spec: DeviceSpec) -> None:
    """Append the Triton candidate of every operation that has one."""
    for op, module in _PLAIN_OPS.items():
        registry.register(triton_candidate(op, can_run_plain, Lazy(module, op)))
    register_attention_ops(registry)
    run, prepare = Lazy("packed_linear", "packed_linear"), Lazy("packed_weight", "prepare")
    registry.register(triton_candidate("linear", can_run_linear, run, prepare))
    register_scaled_ops(registry, spec)
    register_expert_ops(registry)
    register_sampling_ops(registry)
    register_lora_ops(registry)


def can_run_plain(spec: DeviceSpec, problem: PlainProblem) -> str | None:
    """Norms, rotary embedding, activations."""
    return why_not_here(spec, problem.dtype)


def can_run_linear(spec: DeviceSpec, problem: LinearProblem) -> str | None:
    """The packed matmul: weight-only schemes of 2, 3, 4 and 8 bits."""
    reason = why_not_here(spec, problem.dtype) or why_no_matrix(spec, problem.dtype)
    if reason is not None:
        return reason
    if not isinstance(problem.scheme, WeightOnly | Offset):
        return f"the weight is {problem.scheme}, not weight-only quantized"
    if problem.scheme.bits not in BITS:
        return f"{problem.scheme.bits} bits; the packed matmul takes {', '.join(map(str, BITS))}"
    rows = (linear_row(spec.arch, count, problem.dtype.itemsize) for count in (1, 64, 256))
    return next((row.reason for row in rows if isinstance(row, Refused)), None)
