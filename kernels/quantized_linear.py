"""Linear candidates for schemes that no kernel of this build computes natively: they expand the weight, at load or at
each call, and round the input as the scheme says.

On the CPU the weight is expanded once, to float32 panels, or to packed 8-bit ones where it is made of integers.
Elsewhere it stays in its 4 or 8 bits, because a model that was quantized to fit would not fit expanded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..platforms.spec import DeviceSpec
from ..quant.canonical import CanonicalWeight, DenseWeight, dequantize
from ..quant.scheme import Activation, Dense, Int8, LowBit, Scheme, WeightOnly, activation_of
from . import reference
from .cpu import linear as cpu_linear
from .cpu.library import unavailable
from .problems import LinearProblem, dtype_name
from .reference import fake_quantize
from .registry import Assembly, Candidate, Quality, Registry

Prepare = Callable[[CanonicalWeight, torch.dtype], Any]
Run = Callable[[Tensor, Any, Tensor | None], Tensor]

# Widths of codes that the C kernel for packed integers reads.
_PACKED_BITS = (2, 4, 8)


@dataclass(frozen=True, slots=True, eq=False)
class RoundedInput:
    """A prepared weight and how its input is rounded."""

    weight: Any
    activation: Activation
    scale: Tensor | None
    zero: Tensor | None


def register_quantized_ops(registry: Registry, spec: DeviceSpec) -> None:
    """Append the candidates, best first."""
    if spec.device_type == "cpu":
        _register(registry, "c_low_bit_emulated", _packed_in_c, cpu_linear.prepare_low_bit, cpu_linear.run)
        _register(registry, "c_dense_emulated", _dense_in_c, cpu_linear.prepare_dense, cpu_linear.run)
        _register(registry, "c_dense_dequantized", _dense_in_c, cpu_linear.prepare_dense, cpu_linear.run, False)
    else:
        _register(registry, "torch_unpacking_emulated", _kept, keep, run_unpacking)
        _register(registry, "torch_unpacking", _kept, keep, run_unpacking, False)
    _register(registry, "torch_emulated", _always, prepare_dense, reference.linear)
    _register(registry, "torch_dequantized", _always, prepare_dense, reference.linear, False)


def _register(
    registry: Registry,
    name: str,
    can_run: Callable[[DeviceSpec, LinearProblem], str | None],
    prepare: Prepare,
    run: Run,
    emulates: bool = True,
) -> None:
    """Register one way to multiply: for quantized activations (``emulates``), or for plain ones."""
    wanted = _needs_rounding if emulates else _needs_none
    registry.register(
        Candidate(
            op="linear",
            name=name,
            quality=Quality.EMULATED if emulates else Quality.DEQUANTIZING,
            can_run=lambda spec, problem: wanted(problem.scheme) or can_run(spec, problem),
            run=_rounding(run) if emulates else run,
            prepare=_with_input(prepare) if emulates else prepare,
            own_threads=run is cpu_linear.run,
            prepared_bytes=_PREPARED_BYTES.get(prepare),
            assemble=_assembly_of(prepare, emulates=emulates),
        )
    )


def _with_input(prepare: Prepare) -> Prepare:
    def prepare_rounded(weight: CanonicalWeight, dtype: torch.dtype) -> RoundedInput:
        activation = activation_of(weight.scheme)
        assert activation is not None and not isinstance(weight, DenseWeight), f"{weight.scheme} rounds no input"
        return RoundedInput(prepare(weight, dtype), activation, weight.input_scale, weight.input_zero)

    return prepare_rounded


class RoundingAssembly:
    """The assembly of a weight whose input is rounded; all its parts have the same static scale."""

    def __init__(self, assembly: Assembly) -> None:
        self._assembly = assembly
        self._input: tuple[Activation, Tensor | None, Tensor | None] | None = None

    def put(self, first_row: int, part: CanonicalWeight) -> None:
        """Rows ``first_row`` and following become those of ``part``."""
        activation = activation_of(part.scheme)
        assert activation is not None and not isinstance(part, DenseWeight), f"{part.scheme} rounds no input"
        self._input = (activation, part.input_scale, part.input_zero)
        self._assembly.put(first_row, part)

    def finish(self) -> RoundedInput:
        assert self._input is not None, "a weight has parts"
        return RoundedInput(self._assembly.finish(), *self._input)


def _assembly_of(prepare: Prepare, *, emulates: bool) -> Callable[[LinearProblem], Assembly] | None:
    kind = _ASSEMBLIES.get(prepare)
    if kind is None or not emulates:
        return kind
    return lambda problem: RoundingAssembly(kind(problem))


def _rounding(run: Run) -> Run:
    def run_rounded(x: Tensor, weight: RoundedInput, bias: Tensor | None = None) -> Tensor:
        return run(fake_quantize(x, weight.activation, weight.scale, weight.zero), weight.weight, bias)

    return run_rounded


def prepare_dense(weight: CanonicalWeight, dtype: torch.dtype) -> Tensor:
    """The weight as one contiguous [N,K] matrix of ``dtype``; a quantized one is dequantized here, once."""
    if isinstance(weight, DenseWeight):
        return weight.weight.to(dtype).contiguous()
    return dequantize(weight, dtype).contiguous()


def keep(weight: CanonicalWeight, dtype: torch.dtype) -> CanonicalWeight:
    """The weight as it is."""
    return weight


def run_unpacking(x: Tensor, weight: CanonicalWeight, bias: Tensor | None = None) -> Tensor:
    """x [T,K] -> [T,N]; the weight is dequantized for this call."""
    return reference.linear(x, dequantize(weight, x.dtype), bias)


def expanded_bytes(problem: LinearProblem, stored: int) -> int:
    """Of ``prepare_dense``'s matrix."""
    return problem.out_features * problem.in_features * problem.dtype.itemsize


_PREPARED_BYTES: dict[Prepare, Callable[[LinearProblem, int], int]] = {
    prepare_dense: expanded_bytes,
    cpu_linear.prepare_low_bit: cpu_linear.low_bit_bytes,
    cpu_linear.prepare_dense: cpu_linear.dense_bytes,
}

_ASSEMBLIES: dict[Prepare, Callable[[LinearProblem], Assembly]] = {
    cpu_linear.prepare_low_bit: cpu_linear.LowBitAssembly,
    cpu_linear.prepare_dense: cpu_linear.DenseAssembly,
}


def _needs_rounding(scheme: Scheme) -> str | None:
    return f"{scheme} does not quantize activations" if activation_of(scheme) is None else None


def _needs_none(scheme: Scheme) -> str | None:
    return None if activation_of(scheme) is None else f"it would leave out the activation quantization of {scheme}"


def _always(spec: DeviceSpec, problem: LinearProblem) -> str | None:
    return None


def _kept(spec: DeviceSpec, problem: LinearProblem) -> str | None:
    if isinstance(problem.scheme, Dense | WeightOnly):
        return f"{problem.scheme} weights are expanded once, at load"
    return None


def _dense_in_c(spec: DeviceSpec, problem: LinearProblem) -> str | None:
    if problem.dtype is not torch.float32:
        return f"it computes in float32, not {dtype_name(problem.dtype)}"
    return unavailable()


def _packed_in_c(spec: DeviceSpec, problem: LinearProblem) -> str | None:
    scheme = problem.scheme
    if not isinstance(scheme, Int8 | LowBit):
        return f"the weight is {scheme}, not made of integers"
    bits = 8 if isinstance(scheme, Int8) else scheme.bits
    if bits not in _PACKED_BITS:
        return f"it decodes {', '.join(map(str, _PACKED_BITS))} bits, not {bits}"
    group = scheme.block[1] if isinstance(scheme, Int8) else scheme.group_size
    per_word = 32 // bits
    if group != -1 and group % per_word and group < problem.in_features:
        return f"groups of {group} do not end on a word of {per_word} codes"
    return _dense_in_c(spec, problem)
