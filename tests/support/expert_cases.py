"""Inputs of the experts' product, and its float64 definition."""

from __future__ import annotations

import torch
from torch import Tensor
from twofold.kernels.reference import fake_quantize
from twofold.quant.canonical import CanonicalWeight, DenseWeight, EightBitWeight, PackedWeight, dequantize, pack
from twofold.quant.scheme import Dense, Fp8, Int8, Offset, Scheme, WeightOnly, activation_of


def random_weights(scheme: Scheme, num_experts: int, shape: tuple[int, int], seed: int = 0) -> list[CanonicalWeight]:
    """One random weight [N,K] per expert, of values around 0.1."""
    return [_weight(scheme, shape, expert, seed) for expert in range(num_experts)]


def _weight(scheme: Scheme, shape: tuple[int, int], expert: int, seed: int) -> CanonicalWeight:
    random = torch.Generator().manual_seed(seed * 1000 + expert)
    if isinstance(scheme, Dense):
        return DenseWeight(torch.randn(shape, generator=random) * 0.1)
    if isinstance(scheme, Int8 | Fp8):
        return _eight_bit(scheme, shape, expert, random)
    assert isinstance(scheme, WeightOnly | Offset)
    codes = torch.randint(0, 2**scheme.bits, shape, generator=random)
    scales = (torch.rand(shape[0], scheme.num_groups(shape[1]), generator=random) + 0.5) * 0.2 / 2**scheme.bits
    zeros = None
    if not scheme.symmetric:
        zeros = torch.randint(0, 2**scheme.bits, scales.shape, generator=random).to(torch.uint8)
        zeros = -scales * (zeros + 0.3) if isinstance(scheme, Offset) else zeros
    perm = torch.randperm(shape[1], generator=random).to(torch.int32) if scheme.act_order else None
    return PackedWeight(scheme, shape, pack(codes, scheme.bits), scales, zeros, perm)


def _eight_bit(scheme: Int8 | Fp8, shape: tuple[int, int], expert: int, random: torch.Generator) -> EightBitWeight:
    """Static input scales and zeros differ from expert to expert."""
    values = torch.randint(-100, 101, shape, generator=random)
    codes = values.to(torch.int8) if isinstance(scheme, Int8) else values.float().to(torch.float8_e4m3fn)
    scales = (torch.rand(scheme.num_blocks(shape), generator=random) + 0.5) * 2e-3
    asymmetric = isinstance(scheme, Int8) and not scheme.symmetric
    zeros = torch.randint(-9, 10, scales.shape, generator=random).to(torch.int8) if asymmetric else None
    how = scheme.activation
    static = how is not None and not how.dynamic
    return EightBitWeight(
        scheme,
        codes,
        scales,
        zeros,
        torch.tensor(0.02 * (expert + 1)) if static else None,
        torch.tensor(5.0 * expert) if static and how is not None and not how.symmetric else None,
    )


def expected(
    x: Tensor, weights: list[CanonicalWeight], ids: Tensor, routing: Tensor | None = None, *, dtype: torch.dtype
) -> tuple[Tensor, float]:
    """The product in float64, row by row, with each input rounded as the scheme says and a dense weight in ``dtype``;
    and the largest sum of magnitudes."""
    how = activation_of(weights[0].scheme)
    tokens, top_k = ids.shape
    rows = torch.zeros(tokens, top_k, weights[0].shape[0], dtype=torch.float64)
    magnitude = 0.0
    for token in range(tokens):
        for choice in range(top_k):
            row = (x[token, choice] if x.dim() == 3 else x[token])[None]
            expert = int(ids[token, choice])
            if expert < 0:
                continue
            weight = weights[expert]
            if how is not None:
                assert not isinstance(weight, DenseWeight), "a dense weight rounds no input"
                row = fake_quantize(row, how, weight.input_scale, weight.input_zero)
            matrix = dequantize(weight).to(dtype if isinstance(weight, DenseWeight) else torch.float32).double()
            rows[token, choice] = (row.double() @ matrix.T)[0]
            magnitude = max(magnitude, float((row.double().abs() @ matrix.abs().T).max()))
    if routing is None:
        return rows, magnitude
    return (rows * routing.double()[..., None]).sum(1), magnitude * float(routing.abs().sum(1).max())


def random_ids(tokens: int, num_experts: int, top_k: int, seed: int = 0) -> Tensor:
    """Different experts for each token, int32 [T,k]."""
    random = torch.Generator().manual_seed(seed)
    rows = [torch.randperm(num_experts, generator=random)[:top_k] for _ in range(tokens)]
    return torch.stack(rows).to(torch.int32) if rows else torch.empty(0, top_k, dtype=torch.int32)
