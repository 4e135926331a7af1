"""Products with weights of every kind, by themselves and with experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ...quant.canonical import CanonicalWeight, DenseWeight, EightBitWeight, PackedWeight, dequantize, pack
from ...quant.scheme import Activation, Dense, Element, Fp8, Int8, LowBit, Offset, WeightOnly, activation_of
from .. import reference
from ..cpu.linear_int8 import INPUT
from ..problems import ExpertLinearProblem, LinearProblem, MoeRouteProblem
from ..registry import Candidate
from .case import Answer, Case, Source

AnyScheme = Dense | WeightOnly | Offset | Int8 | LowBit | Fp8
SCHEMES: tuple[AnyScheme, ...] = (
    Dense(),
    WeightOnly(4, 32),
    WeightOnly(4, 32, symmetric=False),
    WeightOnly(8, 32),
)
_TOKEN, _STATIC = Activation(Element.INT8), Activation(Element.FP8, 0, dynamic=False)
# What a CPU's other kernels are for.
CPU_SCHEMES: tuple[AnyScheme, ...] = (
    WeightOnly(2, 32),
    Offset(4, 32),
    Int8((1, -1), _TOKEN),
    Int8((1, -1), Activation(Element.INT8, symmetric=False)),
    LowBit(4, 32, activation=_TOKEN),
    Fp8((1, -1)),
    Fp8((1, -1), _STATIC),
)


def cases(source: Source) -> list[Case]:
    """Every scheme; on a CPU also inputs that are rounded because the user asked for it."""
    schemes = SCHEMES + (CPU_SCHEMES if source.on_cpu else ())
    x = source.randn(source.sizes.num_tokens, source.sizes.in_features)
    found = [_linear_case(source, x, scheme) for scheme in schemes]
    found += [case for scheme in schemes for case in _rounded_cases(source, x, scheme)] if source.on_cpu else []
    return found + _expert_cases(source, x, schemes)


def random_weight(source: Source, scheme: AnyScheme) -> CanonicalWeight:
    """A weight [N,K] of a scheme."""
    shape = (source.sizes.out_features, source.sizes.in_features)
    if isinstance(scheme, Dense):
        return DenseWeight(source.randn(*shape))
    if isinstance(scheme, Int8 | Fp8):
        return _eight_bit_weight(source, scheme, shape)
    groups = (shape[0], scheme.num_groups(shape[1]))
    codes, zeros = source.integers(2**scheme.bits, shape), source.integers(2**scheme.bits, groups, torch.uint8)
    scales = source.uniform(*groups) / 8 + 0.01
    if isinstance(scheme, Offset):
        # No format has others: products of 16-bit scales are exact.
        scales = scales.half()
        offsets: Tensor | None = (-scales * zeros).half()
    else:
        offsets = None if scheme.symmetric else zeros
    return PackedWeight(scheme=scheme, shape=shape, qweight=pack(codes, scheme.bits), scales=scales, zeros=offsets)


def _eight_bit_weight(source: Source, scheme: Int8 | Fp8, shape: tuple[int, int]) -> EightBitWeight:
    values = source.normal(*shape).mul(30).round().clamp(-127, 127)
    how = activation_of(scheme)
    static = torch.tensor(0.02, device=source.device) if how is not None and not how.dynamic else None
    return EightBitWeight(
        scheme,
        values.to(torch.int8 if isinstance(scheme, Int8) else torch.float8_e4m3fn),
        source.uniform(*scheme.num_blocks(shape)) / 64 + 0.01,
        input_scale=static,
    )


def _linear_case(source: Source, x: Tensor, scheme: AnyScheme) -> Case:
    weight = random_weight(source, scheme)
    expected = reference.linear(_rounded(x, weight), dequantize(weight, torch.float32))
    return Case("linear", _problem(scheme, x, weight), _product(weight, x), expected)


def _rounded_cases(source: Source, x: Tensor, scheme: AnyScheme) -> list[Case]:
    """The product with inputs in bfloat16, and where weights are integers in 8 bits, rounded once and twice."""
    if activation_of(scheme) is not None:
        return []
    weight = random_weight(source, scheme)
    matrix, problem, run = dequantize(weight, torch.float32), _problem(scheme, x, weight), _product(weight, x)
    # Where code and offset nearly cancel, a weight may be rounded to its neighbour.
    tolerance = 2.0**-8 if isinstance(scheme, Offset | Fp8) else None
    in_bf16 = reference.linear(x.bfloat16().float(), matrix.bfloat16().float())
    found = [Case("linear", problem, run, in_bf16, "bf16", tolerance)]
    if isinstance(scheme, WeightOnly | Offset):
        in_8_bits = reference.linear(reference.fake_quantize(x.float(), INPUT), matrix)
        found.append(Case("linear", problem, run, in_8_bits, "int8"))
        twice = reference.linear(_rounded_twice(x.float()), matrix)
        found.append(Case("linear", replace(problem, is_sensitive=True), run, twice, "int8"))
    return found


def _rounded_twice(x: Tensor) -> Tensor:
    """x in 8 bits, and what that left over again in groups whose squared scale is over twice their row's mean."""
    size = INPUT.group_size
    first = reference.fake_quantize(x, INPUT)
    squares = F.pad(x, (0, -x.shape[1] % size)).unflatten(1, (-1, size)).abs().amax(-1).double() ** 2
    again = (squares > 2 * squares.mean(1, keepdim=True)).repeat_interleave(size, dim=1)[:, : x.shape[1]]
    return first + torch.where(again, reference.fake_quantize(x - first, INPUT), 0.0)


def _problem(scheme: AnyScheme, x: Tensor, weight: CanonicalWeight) -> LinearProblem:
    rows, columns = weight.shape
    return LinearProblem(scheme=scheme, in_features=columns, out_features=rows, dtype=x.dtype)


def _product(weight: CanonicalWeight, x: Tensor) -> Callable[[Candidate], Answer]:
    def run(candidate: Candidate) -> Answer:
        assert candidate.prepare is not None, f"linear kernel {candidate.name} has no prepare"
        result: Tensor = candidate.run(x, candidate.prepare(weight, x.dtype), None)
        return result

    return run


def _rounded(x: Tensor, weight: CanonicalWeight) -> Tensor:
    """x as the weight's scheme rounds it."""
    how = activation_of(weight.scheme)
    if how is None or isinstance(weight, DenseWeight):
        return x.float()
    return reference.fake_quantize(x.float(), how, weight.input_scale, weight.input_zero)


def _expert_cases(source: Source, x: Tensor, schemes: Sequence[AnyScheme]) -> list[Case]:
    """Routing, and for each scheme the sum over a token's experts."""
    num_experts, top_k = source.sizes.num_experts, source.sizes.top_k
    logits = source.normal(x.shape[0], num_experts)
    routing = MoeRouteProblem(num_experts=num_experts, top_k=top_k, dtype=logits.dtype)
    chosen = reference.route(logits, top_k)
    found = [Case("moe_route", routing, lambda candidate: candidate.run(logits, top_k), chosen)]
    for scheme in schemes:
        found.append(_expert_case(source, x, chosen, scheme, "exact"))
    if source.on_cpu:
        found += [_expert_case(source, x, chosen, WeightOnly(4, 32), how) for how in ("int8", "bf16")]
    return found


def _expert_case(source: Source, x: Tensor, chosen: tuple[Tensor, Tensor], scheme: AnyScheme, activations: str) -> Case:
    weights = [random_weight(source, scheme) for _ in range(source.sizes.num_experts)]
    shares, ids = chosen

    def run(candidate: Candidate) -> Answer:
        assert candidate.prepare is not None, f"expert kernel {candidate.name} has no prepare"
        result: Tensor = candidate.run(x, candidate.prepare(weights, x.dtype), ids, shares)
        return result

    problem = ExpertLinearProblem(
        scheme=scheme,
        num_experts=source.sizes.num_experts,
        top_k=source.sizes.top_k,
        in_features=source.sizes.in_features,
        out_features=source.sizes.out_features,
        dtype=x.dtype,
    )
    dense = [dequantize(weight, torch.float32) for weight in weights]
    inputs = _rounded(x, weights[0])  # all experts of these schemes round them alike
    if activations == "int8":
        inputs = reference.fake_quantize(inputs, INPUT)
    elif activations == "bf16":
        inputs, dense = inputs.bfloat16().float(), [matrix.bfloat16().float() for matrix in dense]
    return Case("expert_linear", problem, run, reference.expert_linear(inputs, dense, ids, shares), activations)
