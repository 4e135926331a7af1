"""Run every C kernel of the library given as argument against the reference, over shapes with ragged edges.

A second argument is the program that runs a library of another architecture (``emulated_library``).
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from attention_cases import expected_attention, make_case, queries_for
from check_cpu_tape import check_tape
from emulated_library import open_emulated
from expert_cases import expected, random_ids, random_weights
from int8_cases import eight_bit_weight, expected_product, integer_weight
from kv_codes import DTYPES, codes_of, in_codes, scales_of
from sampling_cases import check_ugly, random_edits
from small_float_cases import SCHEMES, weight_of
from twofold.cli.kernel_check import check_kernels
from twofold.kernels import reference
from twofold.kernels.cases import TYPICAL, Sizes
from twofold.kernels.cpu import (
    attention,
    elementwise,
    experts,
    gptq,
    library,
    linear,
    linear_int8,
    linear_rounded,
    rounding,
    sampling,
    small_floats,
)
from twofold.platforms import cpu_threads
from twofold.platforms.cpu import CpuPlatform
from twofold.quant.canonical import DenseWeight, PackedWeight, dequantize, pack
from twofold.quant.scheme import Activation, Dense, Element, Fp8, Int8, Offset, WeightOnly


def check_linear() -> None:
    for shape in ((1, 1), (33, 129), (70, 700)):
        weight, bias = torch.randn(shape), torch.randn(shape[0])
        prepared = linear.prepare_dense(DenseWeight(weight), torch.float32)
        for rows in range(1, 15):
            x = torch.randn(rows, shape[1])
            torch.testing.assert_close(
                linear.run(x, prepared, bias).double(),
                x.double() @ weight.double().T + bias,
                atol=1e-3,
                rtol=1e-4,
            )
    for bits in (2, 4, 8):
        scheme = WeightOnly(bits, 32, False, False)
        codes, zeros = torch.randint(0, 2**bits, (45, 170)), torch.randint(0, 2**bits, (45, 6)).to(torch.uint8)
        packed = PackedWeight(scheme, (45, 170), pack(codes, bits), torch.randn(45, 6), zeros)
        low_bit, dense = linear.prepare_low_bit(packed, torch.float32), linear.prepare_dense(packed, torch.float32)
        for rows in range(1, 15):
            x = torch.randn(rows, 170)
            result = linear.run(x, low_bit)
            assert torch.equal(result, linear.run(x, dense)), (bits, rows)
            expected = x.double() @ dequantize(packed, torch.float64).T
            torch.testing.assert_close(result.double(), expected, atol=0.05, rtol=1e-3)


def check_int8() -> None:
    for bits in (2, 4, 8):
        for scheme, shape in (
            (WeightOnly(bits, 32), (45, 170)),
            (Offset(bits, -1), (33, 129)),
            (WeightOnly(bits, 16, False), (70, 700)),
        ):
            weight = integer_weight(scheme, shape)
            prepared = linear_int8.prepare(weight, torch.float32)
            for rows in (1, 2, 5, 6, 7, 16, 17, 40):
                x = torch.randn(rows, shape[1])
                expected, size = expected_product(x, weight)
                assert ((linear_int8.run(x, prepared) - expected).abs() <= 1e-6 * size).all(), (scheme, rows)
    for scheme in (Int8((1, -1), Activation(Element.INT8)), Int8((1, 128), Activation(Element.INT8), False)):
        weight = eight_bit_weight(scheme, (45, 1044))
        for rows in (1, 40):
            x = torch.randn(rows, 1044)
            expected, size = expected_product(x, weight)
            result = linear_int8.run(x, linear_int8.prepare(weight, torch.float32))
            assert ((result - expected).abs() <= 1e-6 * size).all(), (scheme, rows)


def check_gated() -> None:
    """Gates and ups of many rows in panels of their own, over one block of features and two."""
    for columns in (170, 700):
        bias = torch.randn(128)
        weight = integer_weight(WeightOnly(4, 32), (128, columns))
        for module, prepared in (
            (linear, linear.prepare_dense(DenseWeight(torch.randn(128, columns)), torch.float32)),
            (linear, linear.prepare_low_bit(weight, torch.float32)),
            (linear_int8, linear_int8.prepare(weight, torch.float32)),
        ):
            for rows in (65, 209):
                x = torch.randn(rows, columns)
                for name, activation in linear.GATES.items():
                    assert linear.is_gated_at_once(rows, 128)
                    result = module.run_gated(x, prepared, bias, name)
                    assert torch.equal(result, activation(module.run(x, prepared, bias))), (columns, rows, name)


def check_small_floats() -> None:
    for scheme, scales in SCHEMES:
        for shape in ((1, 7), (45, 170)):
            weight = weight_of(scheme, scales, shape)
            prepared = small_floats.prepare(weight, torch.float32)
            dense = linear.prepare_dense(DenseWeight(dequantize(weight)), torch.float32)
            for rows in (1, 3, 5, 8, 30):
                x = torch.randn(rows, shape[1])
                rounded = x if scheme.activation is None else reference.fake_quantize(x, scheme.activation)
                assert torch.equal(linear_rounded.run(x, prepared), linear.run(rounded, dense)), (scheme, rows)
    for how in (Activation(Element.INT8, symmetric=False), Activation(Element.FP4, 32, power_of_two=True)):
        x = torch.randn(3, 130)
        assert torch.equal(rounding.round_rows(x, how), reference.fake_quantize(x, how)), how


def check_rounding_experts() -> None:
    x, ids = torch.randn(30, 160), random_ids(30, 5, 2)
    static = Activation(Element.FP8, 0, dynamic=False)
    for scheme, module, run in (
        (Fp8((1, -1), static), small_floats, linear_rounded.run),
        (WeightOnly(4, 32), linear_int8, linear_int8.run),
    ):
        weights = random_weights(scheme, 5, (45, 160))
        result = experts.expert_linear(x, experts.prepare(module.prepare, weights, torch.float32), ids)
        for token, choice in ((0, 0), (29, 1)):
            alone = module.prepare(weights[int(ids[token, choice])], torch.float32)
            assert torch.equal(result[token, choice], run(x[token : token + 1], alone)[0]), scheme


def check_experts() -> None:
    for scheme in (Dense(), WeightOnly(4, 32, False, True)):
        weights = random_weights(scheme, 5, (45, 160))
        prepare = linear.prepare_dense if scheme == Dense() else linear.prepare_low_bit
        panels = experts.prepare(prepare, weights, torch.float32)
        for tokens in (0, 1, 30):
            x, ids, routing = torch.randn(tokens, 160), random_ids(tokens, 5, 2), torch.rand(tokens, 2)
            ids[1::4] = -1
            for given in (None, routing):
                result = experts.expert_linear(x, panels, ids, given)
                wanted, _ = expected(x, weights, ids, given, dtype=torch.float32) if tokens else (result, 0.0)
                torch.testing.assert_close(result.double(), wanted.double(), atol=1e-4, rtol=1e-4)


def check_attention() -> None:
    mixed, long = [(1, 1), (1, 200), (45, 130), (7, 7)], [(2, 700)]
    for lengths, head_size, block_size in ((mixed, 64, 16), (mixed, 20, 4), (mixed, 5, 1), (long, 20, 4)):
        for window, soft_cap in ((None, 0.0), (9, 2.0)):
            case = make_case(lengths, num_heads=6, num_kv_heads=2, head_size=head_size, block_size=block_size)
            result = attention.paged_attention(case.query, case.cache, case.batch, 0.3, window, soft_cap)
            expected = expected_attention(case, 0.3, window, soft_cap)
            torch.testing.assert_close(result.double(), expected, atol=1e-5, rtol=1e-5)
            key, value = torch.randn(2, case.query.shape[0], 2, head_size)
            attention.write_kv(key, value, case.cache, case.batch.slot_mapping)
            slots = case.batch.slot_mapping
            assert torch.equal(case.key_cache[slots // block_size, slots % block_size], key)
            assert torch.equal(case.value_cache[slots // block_size, slots % block_size], value)


def check_bfloat_cache() -> None:
    """Where products are of bfloat16 a weight is rounded by at most 2^-8 of itself."""
    lengths = [(1, 1), (1, 200), (45, 130), (7, 7), (2, 700)]
    for head_size, block_size in ((64, 16), (80, 16), (20, 4), (5, 1), (33, 48)):
        for window, soft_cap in ((None, 0.0), (300, 2.0)):
            case = make_case(
                lengths, num_heads=6, num_kv_heads=2, head_size=head_size, block_size=block_size, dtype=torch.bfloat16
            )
            case = dataclasses.replace(case, query=queries_for(case.query, 0.3, soft_cap))
            result = attention.paged_attention(case.query, case.cache, case.batch, 0.3, window, soft_cap)
            expected = expected_attention(case, 0.3, window, soft_cap)
            sizes = dataclasses.replace(case, values=[value.abs() for value in case.values])
            limit = expected_attention(sizes, 0.3, window, soft_cap) * 2**-8 + 2e-5
            assert ((result.double() - expected).abs() <= limit).all(), (head_size, window)
            key, value = torch.randn(2, case.query.shape[0], 2, head_size)
            attention.write_kv(key, value, case.cache, case.batch.slot_mapping)
            slots = case.batch.slot_mapping
            assert torch.equal(case.key_cache[slots // block_size, slots % block_size], key.bfloat16())
            assert torch.equal(case.value_cache[slots // block_size, slots % block_size], value.bfloat16())


def check_eight_bit_cache() -> None:
    lengths = [(1, 1), (1, 200), (45, 130), (7, 7), (2, 700)]
    for dtype in DTYPES:
        for head_size, block_size in ((64, 16), (20, 4), (5, 1)):
            case = make_case(lengths, num_heads=6, num_kv_heads=2, head_size=head_size, block_size=block_size)
            cache, case = in_codes(case, dtype)
            result = attention.paged_attention(case.query, cache, case.batch, 0.3, 300, 2.0)
            expected = expected_attention(case, 0.3, 300, 2.0)
            torch.testing.assert_close(result.double(), expected, atol=1e-5, rtol=1e-5)
            key, value = torch.randn(2, case.query.shape[0], 2, head_size)
            slots = case.batch.slot_mapping
            attention.write_kv(key, value, cache, slots)
            for x, part, scale in ((key, cache.key, cache.key_scale), (value, cache.value, cache.value_scale)):
                assert torch.equal(scale[slots // block_size, slots % block_size], scales_of(x, dtype))
                stored = part[slots // block_size, slots % block_size]
                assert torch.equal(stored.float(), codes_of(x, scales_of(x, dtype), dtype).float())


def check_elementwise() -> None:
    for size in (6, 37, 64):
        x, weight = torch.randn(9, size), torch.randn(size)
        normed, total = elementwise.add_rms_norm(x, x.clone(), weight, 1e-5)
        torch.testing.assert_close(normed, reference.rms_norm(x + x, weight, 1e-5))
        torch.testing.assert_close(elementwise.rms_norm(total, weight, 1e-5), normed)
        both = torch.randn(9, 2 * size) * 20
        torch.testing.assert_close(elementwise.silu_and_mul(both), reference.silu_and_mul(both))
    q, k, table, positions = torch.randn(9, 4, 12), torch.randn(9, 2, 12), torch.randn(20, 6), torch.arange(9)
    for interleaved in (False, True):
        expected = reference.rope(q, k, table, positions, interleaved)
        torch.testing.assert_close(elementwise.rope(q.clone(), k.clone(), table, positions, interleaved), expected)


def check_sampling() -> None:
    for num_columns in (2, 255, 1000):
        check_ugly(sampling.draw_tokens, num_columns)
    logits, edits = random_edits(5, 300)
    expected = logits.clone()
    reference.edit_logits(expected, edits)
    sampling.edit_logits(logits, edits)
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-6)


def check_candidates() -> None:
    """What an engine could choose, as `twofold doctor` judges it."""
    for sizes in (TYPICAL, Sizes(17, 129, 70, 6, 2, 20, 48, 257, 5, 1)):
        rows = check_kernels(CpuPlatform(), sizes)
        assert not [row for row in rows if row["status"] == "wrong"], sizes


def check_gptq() -> None:
    for rows in (1, 37, 70):
        scales, zeros, codes = torch.rand(2, rows) + 0.1, torch.zeros(2, rows), torch.empty(33, rows)
        rest = (scales, zeros, torch.arange(33) % 2, 15, codes)
        weight = torch.randn(33, rows)
        errors = gptq.round_columns(weight.clone(), torch.eye(33), (1, 33), *rest)
        assert errors is not None
        torch.testing.assert_close(codes[1:], (weight / scales[torch.arange(33) % 2]).round().clamp(0, 15)[1:])
        steps = torch.full((33,), -1.0)
        changes = gptq.move_codes(weight, torch.zeros(33, rows), torch.eye(33), steps, (0, 33), *rest)
        assert changes is not None
    found = gptq.search_grids(torch.randn(rows, 3, 64), [1.0, 0.9], 15, 2, False)
    assert found is None or bool((found[0] > 0).all())


def main(path: str, driver: str | None = None) -> None:
    opened = open_emulated(Path(driver), Path(path)) if driver else library.open_library(Path(path))
    library.load = lambda: opened  # type: ignore[assignment]
    cpu_threads.set_num_threads(3)
    torch.manual_seed(0)
    check_linear()
    check_int8()
    check_gated()
    check_experts()
    check_small_floats()
    check_rounding_experts()
    check_attention()
    check_bfloat_cache()
    check_eight_bit_cache()
    check_elementwise()
    check_sampling()
    check_gptq()
    check_candidates()
    check_tape()


if __name__ == "__main__":
    main(*sys.argv[1:])
