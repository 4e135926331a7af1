"""The support matrix: which kernel each scheme gets on each architecture, from the registry and the tables themselves.

``python -m twofold.kernels.support_matrix`` writes docs/support-matrix.md.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..errors import UnsupportedError
from ..platforms.arch_spec import preferred_dtype_of, spec_of_arch
from ..platforms.spec import DeviceSpec
from ..quant.scheme import Activation, Dense, Element, Fp8, Int8, LowBit, MicroScaled, Offset, Scheme, WeightOnly
from .cpu.library import unavailable
from .kernel_set import default_registry
from .problems import (
    AttentionProblem,
    ExpertLinearProblem,
    KVWriteProblem,
    LinearProblem,
    LoraProblem,
    MoeRouteProblem,
    PlainProblem,
    SamplingProblem,
)
from .registry import Quality, Registry, Selection

ARCHS = (
    "sm_70", "sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120",
    "gfx908", "gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201",
)  # fmt: skip
CPU = "cpu"
FEATURES = 4096
NUM_EXPERTS, TOP_K = 128, 8

_INT8, _FP8 = Activation(Element.INT8), Activation(Element.FP8)
_STATIC_FP8 = Activation(Element.FP8, group_size=0, dynamic=False)
_FP4 = Activation(Element.FP4, group_size=16, dynamic=False)

# What users call it, and one scheme that stands for it.
SCHEMES: tuple[tuple[str, Scheme], ...] = (
    ("16- and 32-bit weights", Dense()),
    ("GPTQ, AWQ, W4A16, `int4`", WeightOnly(4, 128)),
    ("the same with zero points", WeightOnly(4, 128, symmetric=False)),
    ("GPTQ with act-order", WeightOnly(4, 128, act_order=True)),
    ("GPTQ 2 bits", WeightOnly(2, 128)),
    ("GPTQ 3 bits", WeightOnly(3, 128)),
    ("GPTQ 8 bits, W8A16", WeightOnly(8, 128)),
    ("bitsandbytes int8, `int8`", WeightOnly(8, -1)),
    ("AWQ gemv_fast", Offset(4, 128)),
    ("GGUF Q4_0", WeightOnly(4, 32)),
    ("GGUF Q8_0, Q5_0", WeightOnly(8, 32)),
    ("GGUF Q4_1, Q4_K", Offset(4, 32)),
    ("GGUF Q5_1, Q5_K", Offset(8, 32)),
    ("GGUF Q6_K", WeightOnly(8, 16)),
    ("W4A8 int8", LowBit(4, 128, activation=_INT8)),
    ("W4A8 fp8", LowBit(4, 128, activation=_FP8)),
    ("W8A8 int8", Int8((1, -1), activation=_INT8)),
    ("FP8 per tensor, static", Fp8((-1, -1), _STATIC_FP8)),
    ("FP8 per channel and token", Fp8((1, -1), _FP8)),
    ("FP8 in 128x128 blocks", Fp8((128, 128), Activation(Element.FP8, group_size=128))),
    ("FP8 weights only, `fp8`", Fp8((1, -1))),
    ("MXFP8", MicroScaled(Element.FP8, 32, True, Activation(Element.FP8, 32, power_of_two=True))),
    ("MXFP4 weights only", MicroScaled(Element.FP4, 32, True)),
    ("NVFP4", MicroScaled(Element.FP4, 16, False, _FP4)),
    ("NVFP4 weights only", MicroScaled(Element.FP4, 16, False)),
)
PLAIN_OPS = ("rms_norm", "add_rms_norm", "rope", "silu_and_mul", "gelu_and_mul", "copy_blocks")
HEAD_SIZES = (64, 128, 256)

_HEADER = """# Support matrix

Which kernel each scheme gets on each architecture, and how it computes. Written by
`python -m twofold.kernels.support_matrix` from the registry that the engine itself asks; a test compares. For one model
on one device, `twofold doctor MODEL --arch ARCH` says the same with that model's shapes. What the qualities mean:
[quantization](quantization.md#which-kernel-does-a-layer-get).

This is what the kernels accept, not where they have run. GPU columns assume that triton is installed, the CPU's a C
compiler.
"""


def render() -> str:
    """The whole document. UnsupportedError without a C compiler, which would make the CPU's column another one."""
    reason = unavailable()
    if reason is not None:
        raise UnsupportedError(f"the support matrix needs the compiled CPU kernels: {reason}")
    problems = [(name, str(scheme), "linear", _linear(scheme)) for name, scheme in SCHEMES]
    experts: list[_Row] = [(name, str(scheme), "expert_linear", _experts(scheme)) for name, scheme in SCHEMES]
    attention = [(f"attention, heads of {size}", "", "paged_attention", _attention(size)) for size in HEAD_SIZES]
    plain: list[_Row] = [(op, "", op, PlainProblem) for op in PLAIN_OPS]
    plain += [(op, "", op, _sampling) for op in ("argmax", "draw_tokens", "edit_logits")]
    plain += [(op, "", op, _lora) for op in ("lora_shrink", "lora_expand")]
    plain += [("write_kv", "", "write_kv", _kv_write), ("moe_route", "", "moe_route", _route)]
    lines = [_HEADER, "## Linear layers", "", *_tables(problems)]
    lines += ["## Experts", "", f"Of {NUM_EXPERTS} experts each token goes to {TOP_K}.", "", *_tables(experts)]
    lines += ["## Other operations", "", *_tables([*attention, *plain])]
    lines += ["## Why not a better kernel", "", *_reasons([*problems, *attention, *plain])]
    lines += ["## Why not a better kernel for experts", "", *_reasons(experts)]
    return "\n".join(lines)


def main() -> None:
    """Write the document into the repository that this package was imported from."""
    path = Path(__file__).parents[1] / "docs" / "support-matrix.md"
    if not path.parent.is_dir():
        raise UnsupportedError(f"{path.parent} is not there: run this in a checkout of the repository")
    path.write_text(render(), encoding="utf-8")
    print(path)


# Title, scheme, operation, and what makes the problem for a dtype.
_Row = tuple[str, str, str, Any]


def _linear(scheme: Scheme) -> Any:
    return functools.partial(_linear_problem, scheme)


def _experts(scheme: Scheme) -> Any:
    def problem(dtype: torch.dtype) -> ExpertLinearProblem:
        return ExpertLinearProblem(
            scheme=scheme,
            num_experts=NUM_EXPERTS,
            top_k=TOP_K,
            in_features=FEATURES,
            out_features=FEATURES,
            dtype=dtype,
        )

    return problem


def _route(dtype: torch.dtype) -> MoeRouteProblem:
    return MoeRouteProblem(num_experts=NUM_EXPERTS, top_k=TOP_K, dtype=dtype)


def _linear_problem(scheme: Scheme, dtype: torch.dtype) -> LinearProblem:
    return LinearProblem(scheme=scheme, in_features=FEATURES, out_features=FEATURES, dtype=dtype)


def _kv_write(dtype: torch.dtype) -> KVWriteProblem:
    return KVWriteProblem(dtype=dtype, kv_dtype=dtype)


def _attention(head_size: int) -> Any:
    def problem(dtype: torch.dtype) -> AttentionProblem:
        return AttentionProblem(
            num_heads=32, num_kv_heads=8, head_size=head_size, block_size=16, dtype=dtype, kv_dtype=dtype
        )

    return problem


def _sampling(dtype: torch.dtype) -> SamplingProblem:
    return SamplingProblem(vocab_size=151936)


def _lora(dtype: torch.dtype) -> LoraProblem:
    return LoraProblem(rank=16, in_features=FEATURES, out_features=FEATURES, dtype=dtype)


@functools.cache
def _device(arch: str) -> tuple[DeviceSpec, Registry]:
    spec = spec_of_arch(arch) if arch != CPU else _cpu_spec()
    return spec, default_registry(spec)


def _cpu_spec() -> DeviceSpec:
    return DeviceSpec(
        vendor="cpu",
        arch=CPU,
        name=CPU,
        device_type="cpu",
        wave_size=1,
        shared_memory_per_block=0,
        num_cores=1,
    )


def _select(row: _Row, arch: str) -> Selection:
    spec, registry = _device(arch)
    dtype = preferred_dtype_of(spec, torch.bfloat16)
    return registry.select(row[2], spec, row[3](dtype))


def _tables(rows: Sequence[_Row]) -> list[str]:
    """One table; architectures that agree in every row share a column."""
    columns: dict[tuple[str, ...], list[str]] = {}
    for arch in (CPU, *ARCHS):
        answers = tuple(_cell(_select(row, arch)) for row in rows)
        columns.setdefault(answers, []).append(arch)
    heads = [", ".join(archs) for archs in columns.values()]
    lines = [f"| | {' | '.join(heads)} |", f"| --- |{' --- |' * len(heads)}"]
    for index, (title, scheme, _, _) in enumerate(rows):
        name = f"{title} ({scheme})" if scheme else title
        lines.append(f"| {name} | {' | '.join(answers[index] for answers in columns)} |")
    return [*lines, ""]


def _cell(selection: Selection) -> str:
    candidate = selection.candidate
    return f"{candidate.name}: {candidate.quality.value}"


def _reasons(rows: Sequence[_Row]) -> list[str]:
    """For every row without a native kernel somewhere: the refusals, architectures with the same ones together."""
    lines = []
    for row in rows:
        by_text: dict[str, list[str]] = {}
        for arch in (CPU, *ARCHS):
            selection = _select(row, arch)
            if selection.candidate.quality is not Quality.NATIVE and selection.refused:
                text = "; ".join(f"{name}: {reason}" for name, reason in selection.refused)
                by_text.setdefault(text.replace(f"{arch} has", "it has"), []).append(arch)
        if by_text:
            name = f"{row[0]} ({row[1]})" if row[1] else row[0]
            lines += [f"- {name}", *(f"  - {', '.join(archs)}: {text}" for text, archs in by_text.items())]
    return [*lines, ""]


if __name__ == "__main__":
    main()
