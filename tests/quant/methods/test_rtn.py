"""Round to nearest against the textbook rule, and where weights are degenerate."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from twofold.quant.canonical import dequantize
from twofold.quant.methods.rtn import quantize_rtn
from twofold.quant.scheme import WeightOnly


def textbook(weight: torch.Tensor, bits: int, group_size: int, symmetric: bool) -> torch.Tensor:
    """The formats' own rule without any search: the group's whole range, evenly divided."""
    groups = weight.double().unflatten(1, (-1, group_size))
    top = 2**bits - 1
    if symmetric:
        scale = (groups.abs().amax(-1, keepdim=True) * 2 / top).half().double()
        zero = torch.full_like(scale, 2 ** (bits - 1))
    else:
        low, high = groups.amin(-1, keepdim=True).clamp(max=0), groups.amax(-1, keepdim=True).clamp(min=0)
        scale = ((high - low) / top).half().double()
        zero = (-low / scale).round()
    codes = ((groups / scale).round() + zero).clamp(0, top)
    return ((codes - zero) * scale).flatten(1).float()


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_error_is_below_the_textbook_rule(bits: int, symmetric: bool) -> None:
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(bits)) * 0.05
    ours = (dequantize(quantize_rtn(weight, WeightOnly(bits, 32, symmetric))) - weight).norm()
    plain = (textbook(weight, bits, 32, symmetric) - weight).norm()
    assert ours < plain * (0.98 if bits >= 4 else 0.95)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_without_clipping_it_is_the_textbook_rule(bits: int, symmetric: bool) -> None:
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(bits)) * 0.05
    plain = dequantize(quantize_rtn(weight, WeightOnly(bits, 32, symmetric), clips=False))
    assert torch.allclose(plain, textbook(weight, bits, 32, symmetric), rtol=1e-6, atol=0)


@settings(deadline=None, max_examples=25)
@given(
    bits=st.sampled_from([2, 3, 4, 8]),
    symmetric=st.booleans(),
    shift=st.sampled_from([0.0, 3.0, -3.0]),
    size=st.sampled_from([1e-6, 1.0, 1e4]),
    seed=st.integers(0, 99),
)
def test_error_is_bounded_by_the_range(bits: int, symmetric: bool, shift: float, size: float, seed: int) -> None:
    """Never worse, group by group, than one level of the widest grid for every weight."""
    weight = (torch.randn(8, 64, generator=torch.Generator().manual_seed(seed)) + shift) * size
    packed = quantize_rtn(weight, WeightOnly(bits, 32, symmetric))
    assert packed.scales.dtype is torch.float16 and bool(packed.scales.isfinite().all())
    error = (dequantize(packed) - weight).unflatten(1, (-1, 32)).norm(dim=-1)
    limit = weight.abs().unflatten(1, (-1, 32)).amax(-1) / 2 ** (bits - 1) * 32**0.5
    assert bool((error <= limit * 1.01 + 1e-6).all())


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("value", [0.0, 0.5, -0.25])
def test_constant_groups_are_exact(symmetric: bool, value: float) -> None:
    weight = torch.full((8, 64), value)
    assert torch.allclose(dequantize(quantize_rtn(weight, WeightOnly(4, 32, symmetric))), weight, rtol=2**-10)


def test_one_group_per_row_and_a_short_last_group() -> None:
    weight = torch.randn(8, 96, generator=torch.Generator().manual_seed(0))
    whole = quantize_rtn(weight, WeightOnly(8, -1))
    assert whole.scales.shape == (8, 1) and whole.scheme.group_size == -1
    ragged = quantize_rtn(weight, WeightOnly(8, 64))
    assert ragged.scales.shape == (8, 2)
    assert (dequantize(ragged) - weight).norm() < 0.02 * weight.norm()


def test_the_number_of_threads_does_not_change_the_result() -> None:
    weight = torch.randn(300, 1024, generator=torch.Generator().manual_seed(1))
    before = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2):
            torch.set_num_threads(count)
            results.append(quantize_rtn(weight, WeightOnly(4, 32, False)))
            assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0].qweight, results[1].qweight)
    assert torch.equal(results[0].scales, results[1].scales)
