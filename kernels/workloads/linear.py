"""Matrix products with dense, packed and 8-bit weights: the fused QKV and gate-up projections of a layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from ...quant.canonical import CanonicalWeight, DenseWeight, EightBitWeight, PackedWeight
from ...quant.packing import num_words
from ...quant.scheme import Activation, Dense, Element, Fp8, Int8, WeightOnly, activation_of
from ..problems import LinearProblem
from ..registry import Candidate
from .workload import Call, Inputs, ModelShapes, Step, Workload

LinearScheme = Dense | WeightOnly | Int8 | Fp8
# x is read by every tile of outputs and a scale by every tile of its group: caches serve both.
CACHED = frozenset({"x_ptr", "scales_ptr", "zeros_ptr", "bias_ptr", "perm_ptr", "x_scale_ptr", "w_scale_ptr"})


def schemes(inputs: Inputs, model: ModelShapes) -> Iterator[LinearScheme]:
    """The schemes that matter on a device; fp8 only where it has that type."""
    yield Dense()
    yield WeightOnly(4, model.group_size)
    yield WeightOnly(4, model.group_size, symmetric=False)
    yield WeightOnly(8, -1)
    yield Int8((1, -1), Activation(Element.INT8))
    if inputs.fp8 is not None:
        yield Fp8((1, -1), Activation(Element.FP8))
        yield Fp8((128, 128), Activation(Element.FP8, 128))
        yield Fp8((1, -1))


def workloads(inputs: Inputs, model: ModelShapes, step: Step) -> Iterator[Workload]:
    """Both ways round, wide and narrow, in every scheme; in float32, a CPU's type, also as a sensitive layer."""
    shapes = ((2 * model.intermediate, model.hidden), (model.hidden, model.intermediate))
    for scheme in schemes(inputs, model):
        for shape in shapes:
            yield linear_workload(inputs, scheme, shape, step.num_tokens)
    if inputs.dtype is torch.float32:
        scheme = WeightOnly(4, model.group_size)
        yield linear_workload(inputs, scheme, shapes[0], step.num_tokens, is_sensitive=True)


def linear_workload(
    inputs: Inputs, scheme: LinearScheme, shape: tuple[int, int], num_tokens: int, *, is_sensitive: bool = False
) -> Workload:
    """x [T,K] times a random weight [N,K] of a scheme; ``shape`` is (N, K)."""
    rows, columns = shape
    weight = random_weight(inputs, scheme, shape)
    x = inputs.randn(num_tokens, columns)

    def bind(candidate: Candidate) -> Call:
        assert candidate.prepare is not None, f"linear kernel {candidate.name} has no prepare"
        prepared = candidate.prepare(weight, inputs.dtype)
        return lambda: candidate.run(x, prepared, None)

    name, peer = _peer(inputs, scheme, shape, num_tokens)
    num_bytes = weight.nbytes + x.nbytes + num_tokens * rows * inputs.dtype.itemsize
    # A quantized input is written and read once more: as codes, or in 16 bits where the product is emulated.
    rounded = 0 if activation_of(scheme) is None else 4 * x.numel()
    return Workload(
        op="linear",
        label=f"{scheme}, {num_tokens}x{columns} -> {rows}" + (", sensitive" if is_sensitive else ""),
        problem=LinearProblem(
            scheme=scheme, in_features=columns, out_features=rows, dtype=inputs.dtype, is_sensitive=is_sensitive
        ),
        bind=bind,
        num_bytes=num_bytes,
        operations=2 * num_tokens * rows * columns,
        peer_name=name,
        peer=peer,
        cached=CACHED,
        allowance=1.05 + rounded / num_bytes,
    )


def random_weight(inputs: Inputs, scheme: LinearScheme, shape: tuple[int, int]) -> CanonicalWeight:
    """A weight [N,K] of a scheme."""
    rows, columns = shape
    if isinstance(scheme, Dense):
        return DenseWeight(inputs.randn(rows, columns))
    if isinstance(scheme, WeightOnly):
        groups = (rows, scheme.num_groups(columns))
        words = (rows, num_words(columns, scheme.bits))
        zeros = None if scheme.symmetric else inputs.integers(0, 2**scheme.bits, groups, torch.uint8)
        return PackedWeight(
            scheme=scheme,
            shape=shape,
            qweight=inputs.integers(-(2**31), 2**31 - 1, words, torch.int32),
            scales=(inputs.uniform(*groups) / 64).to(torch.float16),
            zeros=zeros,
        )
    scales = inputs.uniform(*scheme.num_blocks(shape)) / 64
    if isinstance(scheme, Fp8):
        return EightBitWeight(scheme, inputs.fp8_codes(rows, columns), scales)
    return EightBitWeight(scheme, inputs.integers(-127, 128, shape, torch.int8), scales)


def _peer(
    inputs: Inputs, scheme: LinearScheme, shape: tuple[int, int], num_tokens: int
) -> tuple[str, Callable[[], Call] | None]:
    """The vendor library's product: of 8-bit matrices where the scheme has them, of dense ones otherwise.

    Whatever torch refuses there (devices differ in what they take) shows as that peer's error.
    """
    if inputs.device.type != "cpu" and isinstance(scheme, Fp8) and scheme.activation is not None:
        return "_scaled_mm", lambda: _scaled_mm(inputs, shape, num_tokens)
    if inputs.device.type != "cpu" and isinstance(scheme, Int8):
        return "_int_mm", lambda: _int_mm(inputs, shape, num_tokens)

    def dense() -> Call:
        x, weight = inputs.randn(num_tokens, shape[1]), inputs.randn(*shape)
        return lambda: F.linear(x, weight)

    return "dense linear", dense


def _scaled_mm(inputs: Inputs, shape: tuple[int, int], num_tokens: int) -> Call:
    rows, columns = shape
    x, weight = inputs.fp8_codes(num_tokens, columns), inputs.fp8_codes(rows, columns)
    one = torch.ones((), device=inputs.device)
    return lambda: torch._scaled_mm(x, weight.t(), scale_a=one, scale_b=one, out_dtype=inputs.dtype)


def _int_mm(inputs: Inputs, shape: tuple[int, int], num_tokens: int) -> Call:
    """cuBLAS takes more than 16 rows only, so fewer are padded to 32."""
    x = inputs.integers(-127, 128, (max(num_tokens, 32), shape[1]), torch.int8)
    weight: Tensor = inputs.integers(-127, 128, shape, torch.int8)
    return lambda: torch._int_mm(x, weight.t())
