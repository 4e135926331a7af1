"""Times of every kernel candidate on one device, with GB/s and GFLOP/s: `python benchmarks/kernels.py [--device cuda]`.

Needs torch and Twofold's engine side only: no server package is imported. Shapes are those of a 7B Llama (hidden size
4096), or of SmolLM2 135M with `--small`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from twofold.kernels.attention_batch import AttentionBatch
from twofold.kernels.kernel_set import default_registry
from twofold.kernels.kv_layout import allocate_kv_cache
from twofold.kernels.problems import AttentionProblem, LinearProblem, PlainProblem
from twofold.kernels.registry import Candidate
from twofold.platforms import Platform, select_platform
from twofold.quant.canonical import CanonicalWeight, DenseWeight, PackedWeight
from twofold.quant.packing import num_words
from twofold.quant.scheme import Dense, WeightOnly

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Shapes:
    """Sizes of one model."""

    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    group_size: int


LARGE = Shapes(4096, 11008, 32, 8, 128, 128)
SMALL = Shapes(576, 1536, 9, 3, 64, 32)


@dataclass(frozen=True)
class Case:
    """One operation to time. ``num_bytes`` and ``operations`` are the least that any kernel must move and compute."""

    op: str
    label: str
    problem: Any
    prepare: Callable[[Candidate], Callable[[], Any]]
    num_bytes: int
    operations: int


def main() -> None:
    """Time everything and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or rocm")
    parser.add_argument("--small", action="store_true", help="shapes of SmolLM2 135M")
    parser.add_argument("--milliseconds", type=float, default=200.0, help="time to spend on each measurement")
    parser.add_argument("--seconds", type=float, default=240.0, help="stop beginning new measurements after this long")
    args = parser.parse_args()
    platform = select_platform(args.device)
    platform.set_threads(None)
    print(f"{platform.spec.name} ({platform.spec.arch}), torch {torch.__version__}\n")
    print("| op | shape | kernel | quality | us | GB/s | GFLOP/s |\n| --- | --- | --- | --- | ---: | ---: | ---: |")
    limit = time.monotonic() + args.seconds
    with torch.inference_mode():
        for line in measure(platform, SMALL if args.small else LARGE, args.milliseconds / 1000, limit):
            print(line, flush=True)


def measure(platform: Platform, shapes: Shapes, seconds: float, limit: float) -> Iterator[str]:
    """One line per case and candidate; a candidate that cannot run gives its reason."""
    registry = default_registry(platform.spec)
    for case in make_cases(platform, shapes):
        for candidate in registry.candidates(case.op):
            start = f"| {case.op} | {case.label} | {candidate.name} | {candidate.quality.value} |"
            reason = candidate.can_run(platform.spec, case.problem)
            if reason or time.monotonic() > limit:
                yield f"{start} {reason or 'no time left'} | | |"
                continue
            try:
                duration = time_call(case.prepare(candidate), platform, seconds)
            except Exception as error:  # one broken kernel must not hide the others' times
                yield f"{start} {type(error).__name__}: {str(error)[:80]} | | |"
                continue
            rates = f"{case.num_bytes / duration / 1e9:.0f} | {case.operations / duration / 1e9:.0f}"
            yield f"{start} {duration * 1e6:.1f} | {rates} |"


def time_call(call: Callable[[], Any], platform: Platform, seconds: float) -> float:
    """Seconds of one call: the best of three means, after a warm-up that also compiles."""
    call()
    platform.synchronize()
    begin = time.perf_counter()
    call()
    platform.synchronize()
    count = max(1, int(seconds / 3 / max(time.perf_counter() - begin, 1e-6)))
    best = float("inf")
    for _ in range(3):
        begin = time.perf_counter()
        for _ in range(count):
            call()
        platform.synchronize()
        best = min(best, (time.perf_counter() - begin) / count)
    return best


def make_cases(platform: Platform, shapes: Shapes) -> list[Case]:
    """Decode and prefill shapes of each operation that matters."""
    dtype = platform.preferred_dtype(torch.bfloat16)
    cases = [_norm_case(platform, shapes, dtype, tokens) for tokens in (1, 32, 1024)]
    cases += [_activation_case(platform, shapes, dtype, tokens) for tokens in (1, 1024)]
    for scheme in (Dense(), WeightOnly(4, shapes.group_size), WeightOnly(4, shapes.group_size, symmetric=False)):
        cases += [_linear_case(platform, shapes, dtype, scheme, tokens) for tokens in (1, 8, 32, 512)]
    lengths = ((1, 1024, 1), (32, 1024, 1), (32, 4096, 1), (1, 2048, 2048))
    return cases + [_attention_case(platform, shapes, dtype, *length) for length in lengths]


def _randn(platform: Platform, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(*shape, device=platform.device, dtype=dtype)


def _norm_case(platform: Platform, shapes: Shapes, dtype: torch.dtype, tokens: int) -> Case:
    x, residual = (_randn(platform, dtype, tokens, shapes.hidden) for _ in range(2))
    weight = _randn(platform, dtype, shapes.hidden)

    def prepare(candidate: Candidate) -> Callable[[], Any]:
        return lambda: candidate.run(x, residual, weight, 1e-5)

    label = f"{tokens} x {shapes.hidden}"
    return Case("add_rms_norm", label, PlainProblem(dtype), prepare, 4 * x.nbytes, 5 * x.numel())


def _activation_case(platform: Platform, shapes: Shapes, dtype: torch.dtype, tokens: int) -> Case:
    x = _randn(platform, dtype, tokens, 2 * shapes.intermediate)

    def prepare(candidate: Candidate) -> Callable[[], Any]:
        return lambda: candidate.run(x)

    label = f"{tokens} x {shapes.intermediate}"
    return Case("silu_and_mul", label, PlainProblem(dtype), prepare, x.nbytes * 3 // 2, 2 * x.numel())


def _linear_case(platform: Platform, shapes: Shapes, dtype: torch.dtype, scheme: Any, tokens: int) -> Case:
    rows, columns = 2 * shapes.intermediate, shapes.hidden
    weight = _weight(platform, scheme, rows, columns, dtype)
    x = _randn(platform, dtype, tokens, columns)

    def prepare(candidate: Candidate) -> Callable[[], Any]:
        assert candidate.prepare is not None, f"linear kernel {candidate.name} has no prepare"
        prepared = candidate.prepare(weight, dtype)
        return lambda: candidate.run(x, prepared, None)

    problem = LinearProblem(scheme=scheme, in_features=columns, out_features=rows, dtype=dtype)
    moved = weight.nbytes + x.nbytes + tokens * rows * dtype.itemsize
    label = f"{tokens} x {rows}x{columns} {scheme}"
    return Case("linear", label, problem, prepare, moved, 2 * tokens * rows * columns)


def _weight(platform: Platform, scheme: Any, rows: int, columns: int, dtype: torch.dtype) -> CanonicalWeight:
    if isinstance(scheme, Dense):
        return DenseWeight(_randn(platform, dtype, rows, columns))
    shape = (rows, num_words(columns, scheme.bits))
    groups = (rows, scheme.num_groups(columns))
    zeros = torch.randint(0, 2**scheme.bits, groups, dtype=torch.uint8, device=platform.device)
    return PackedWeight(
        scheme=scheme,
        shape=(rows, columns),
        qweight=torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32, device=platform.device),
        scales=torch.rand(groups, device=platform.device, dtype=dtype) / 64,
        zeros=None if scheme.symmetric else zeros,
    )


def _attention_case(
    platform: Platform, shapes: Shapes, dtype: torch.dtype, requests: int, context: int, query_len: int
) -> Case:
    blocks = -(-context // BLOCK_SIZE)
    cache = allocate_kv_cache(
        requests * blocks, BLOCK_SIZE, shapes.num_kv_heads, shapes.head_size, dtype, platform.device
    )
    for part in cache.tensors:
        part.normal_()
    query = _randn(platform, dtype, requests * query_len, shapes.num_heads, shapes.head_size)
    table = torch.randperm(requests * blocks).to(platform.device, torch.int32).view(requests, blocks)
    offsets = torch.arange(context - query_len, context, device=platform.device)
    slots = table[:, offsets // BLOCK_SIZE].long() * BLOCK_SIZE + offsets % BLOCK_SIZE
    batch = AttentionBatch(
        query_start_loc=torch.arange(0, requests * query_len + 1, query_len, dtype=torch.int32).to(platform.device),
        seq_lens=torch.full((requests,), context, dtype=torch.int32, device=platform.device),
        block_table=table,
        slot_mapping=slots.flatten(),
        query_lens_host=(query_len,) * requests,
        seq_lens_host=(context,) * requests,
    )

    def prepare(candidate: Candidate) -> Callable[[], Any]:
        return lambda: candidate.run(query, cache, batch, shapes.head_size**-0.5, None, 0.0)

    problem = AttentionProblem(
        num_heads=shapes.num_heads,
        num_kv_heads=shapes.num_kv_heads,
        head_size=shapes.head_size,
        block_size=BLOCK_SIZE,
        dtype=dtype,
        kv_dtype=dtype,
    )
    pairs = requests * (query_len * context - query_len * (query_len - 1) // 2)
    moved = sum(part.nbytes for part in cache.tensors) + 2 * query.nbytes
    label = f"{requests} requests, {query_len} of {context} tokens"
    operations = 4 * pairs * shapes.num_heads * shapes.head_size
    return Case("paged_attention", label, problem, prepare, moved, operations)


if __name__ == "__main__":
    main()
