"""What two threads of this machine can do, for the bounds of a table: read bandwidth and matrix products.

Products are those of a layer of SmolLM2 and of a larger one over 512 rows, by the fastest of torch's kernels: float32,
bfloat16, and int8 (fbgemm's and oneDNN's dynamic linear, and the plain int8 product). A matrix times a vector reads
several rows at a time, which more requests to memory can be under way for than for one place.
"""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable, Iterator

import torch

SHAPES = [(576, 1536), (1536, 576), (2048, 2048)]
ROWS = 512
MATRIX_COLUMNS = 1 << 14


def machine_speed(threads: int, seconds: float = 10.0) -> dict[str, float]:
    """GB/s of reading a gigabyte in ordinary and in large pages, in order and as a matrix times a vector, and the best
    GFLOP/s of each kind of product.

    ``seconds`` is shared out among some twenty measurements; each takes its best repetition.
    """
    from twofold.kernels.cpu import weight_memory

    torch.set_num_threads(threads)
    each = seconds / 24
    figures = {}
    large = weight_memory.empty((1 << 28,), torch.float32)
    for name, area, read in (
        ("read_gbs", torch.empty(1 << 28), torch.sum),
        ("read_large_pages_gbs", large, torch.sum),
        ("read_matrix_gbs", large.view(-1, MATRIX_COLUMNS), _times_ones),
        ("read_112mb_gbs", weight_memory.empty((28_000_000,), torch.float32), torch.sum),
    ):
        area.fill_(1.0)
        figures[name] = area.nbytes / _best(functools.partial(read, area), each) / 1e9
    del area, large
    for features, outputs in SHAPES:
        for kind, call in _products(features, outputs):
            rate = 2 * ROWS * features * outputs / _best(call, each) / 1e9
            figures[kind] = max(rate, figures.get(kind, 0.0))
    return figures


def _times_ones(matrix: torch.Tensor) -> torch.Tensor:
    return torch.mv(matrix, torch.ones(matrix.shape[1]))


def _products(features: int, outputs: int) -> Iterator[tuple[str, Callable[[], object]]]:
    x, weight = torch.randn(ROWS, features), torch.randn(outputs, features)
    yield "float32_gflops", lambda: torch.nn.functional.linear(x, weight)
    x16, weight16 = x.bfloat16(), weight.bfloat16()
    yield "bfloat16_gflops", lambda: torch.nn.functional.linear(x16, weight16)
    for engine in ("fbgemm", "onednn"):
        if engine in torch.backends.quantized.supported_engines:
            yield f"int8_{engine}_gflops", _dynamic_linear(engine, x, weight)
    x8, weight8 = x.to(torch.int8), weight.to(torch.int8).t()
    yield "int8_product_gflops", lambda: torch._int_mm(x8, weight8)


def _dynamic_linear(engine: str, x: torch.Tensor, weight: torch.Tensor) -> Callable[[], object]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.backends.quantized.engine = engine
        codes = torch.quantize_per_channel(
            weight, weight.abs().amax(1) / 127, torch.zeros(len(weight), dtype=torch.long), 0, torch.qint8
        )
        packed = torch.ops.quantized.linear_prepack(codes, None)
    return lambda: torch.ops.quantized.linear_dynamic(x, packed, True)


def _best(call: Callable[[], object], seconds: float) -> float:
    best, end = float("inf"), time.perf_counter() + seconds
    call()
    while True:
        start = time.perf_counter()
        call()
        now = time.perf_counter()
        best = min(best, now - start)
        if now > end:
            return best
