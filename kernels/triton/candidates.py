"""The Triton kernels as candidates of the registry. Nothing here imports triton until a kernel runs."""

from __future__ import annotations

from ...platforms.spec import DeviceSpec
from ...quant.scheme import WeightOnly
from ..problems import AttentionProblem, KVWriteProblem, LinearProblem, PlainProblem
from ..registry import Registry
from .candidate_rules import Lazy, triton_candidate, why_no_matrix, why_not_here
from .candidates_experts import register_expert_ops
from .candidates_lora import register_lora_ops
from .candidates_sampling import register_sampling_ops
from .candidates_scaled import register_scaled_ops
from .launch_table import Refused, attention_row, linear_row

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


def register_triton_ops(registry: Registry, spec: DeviceSpec) -> None:
    """Append the Triton candidate of every operation that has one."""
    for op, module in _PLAIN_OPS.items():
        registry.register(triton_candidate(op, can_run_plain, Lazy(module, op)))
    registry.register(triton_candidate("write_kv", can_run_kv_write, Lazy("write_kv", "write_kv")))
    attend = Lazy("paged_attention", "paged_attention")
    registry.register(triton_candidate("paged_attention", can_run_attention, attend))
    run, prepare = Lazy("packed_linear", "packed_linear"), Lazy("packed_weight", "prepare")
    registry.register(triton_candidate("linear", can_run_linear, run, prepare))
    register_scaled_ops(registry, spec)
    register_expert_ops(registry)
    register_sampling_ops(registry)
    register_lora_ops(registry)


def can_run_plain(spec: DeviceSpec, problem: PlainProblem) -> str | None:
    """Norms, rotary embedding, activations."""
    return why_not_here(spec, problem.dtype)


def can_run_kv_write(spec: DeviceSpec, problem: KVWriteProblem) -> str | None:
    """Writes into the cache: both dtypes."""
    return why_not_here(spec, problem.dtype, problem.kv_dtype)


def can_run_attention(spec: DeviceSpec, problem: AttentionProblem) -> str | None:
    """Paged attention: head size, query heads per KV head, dtypes, and the launch table's refusals."""
    reason = why_not_here(spec, problem.dtype, problem.kv_dtype) or why_no_matrix(spec, problem.dtype)
    if reason is not None:
        return reason
    if problem.has_sinks or problem.has_alibi or problem.value_size != problem.head_size:
        return "it has no attention sinks, no ALiBi and no values of another size than the keys"
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
    reason = why_not_here(spec, problem.dtype) or why_no_matrix(spec, problem.dtype)
    if reason is not None:
        return reason
    if not isinstance(problem.scheme, WeightOnly):
        return f"the weight is {problem.scheme}, not weight-only quantized"
    if problem.scheme.bits not in BITS:
        return f"{problem.scheme.bits} bits; the packed matmul takes {', '.join(map(str, BITS))}"
    rows = (linear_row(spec.arch, count, problem.dtype.itemsize) for count in (1, 64, 256))
    return next((row.reason for row in rows if isinstance(row, Refused)), None)
