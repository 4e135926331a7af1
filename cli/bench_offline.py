"""Latency and throughput of the offline engine, with memory and arithmetic rates beside tokens per second."""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import time
from typing import Any

from ..engine.config import EngineConfig
from ..engine.core.engine_core import EngineCore
from ..engine.core.kv_cache import model_block_bytes
from ..engine.core.loading import CoreParts, load_parts
from ..engine.messages import EngineRequest
from ..engine.model_config import ModelConfig
from ..engine.models.model import Model
from ..engine.sampling_params import SamplingParams

_LABELS = {
    "time_to_first_token_ms": "time to first token, ms",
    "time_per_output_token_ms": "time per output token, ms",
    "seconds": "seconds",
    "prefill_tokens_per_second": "prefill tokens/s",
    "prefill_gflop_per_second": "prefill GFLOP/s",
    "decode_tokens_per_second": "decode tokens/s",
    "decode_gb_per_second": "decode GB/s",
    "output_tokens_per_second": "output tokens/s",
    "total_tokens_per_second": "total tokens/s",
    "gflop_per_second": "GFLOP/s",
}


def measure_latency(config: EngineConfig, args: argparse.Namespace) -> dict[str, Any]:
    """One batch at a time; medians over the iterations."""
    bench = OfflineBench(config)
    runs = [bench.run(args.batch_size, args.input_len, args.output_len) for _ in range(args.iterations)]
    prefill, total = (statistics.median(column) for column in zip(*runs, strict=True))
    return bench.describe("latency", args) | latency_figures(
        bench.model, prefill, total, args.batch_size, args.input_len, args.output_len
    )


def measure_throughput(config: EngineConfig, args: argparse.Namespace) -> dict[str, Any]:
    """All prompts at once, once."""
    bench = OfflineBench(config)
    _, seconds = bench.run(args.num_prompts, args.input_len, args.output_len)
    num_prompt, num_output = args.num_prompts * args.input_len, args.num_prompts * args.output_len
    operations = matmul_operations(bench.model.config, num_prompt + num_output - args.num_prompts, num_output)
    return bench.describe("throughput", args) | {
        "seconds": seconds,
        "output_tokens_per_second": num_output / seconds,
        "total_tokens_per_second": (num_prompt + num_output) / seconds,
        "gflop_per_second": operations / seconds / 1e9,
    }


def latency_figures(
    model: Model, prefill: float, total: float, batch_size: int, input_len: int, output_len: int
) -> dict[str, float]:
    """Figures from two times in seconds: until every request has its first token, and until all are done."""
    figures = {
        "time_to_first_token_ms": 1000 * prefill,
        "seconds": total,
        "prefill_tokens_per_second": batch_size * input_len / prefill,
        "prefill_gflop_per_second": matmul_operations(model.config, batch_size * input_len, batch_size) / prefill / 1e9,
        "output_tokens_per_second": batch_size * output_len / total,
    }
    num_steps = output_len - 1
    if num_steps:
        per_step = (total - prefill) / num_steps
        context = batch_size * (input_len + output_len / 2)
        num_bytes = decode_weight_bytes(model) + context * kv_bytes_per_token(model)
        figures["time_per_output_token_ms"] = 1000 * per_step
        figures["decode_tokens_per_second"] = batch_size / per_step
        figures["decode_gb_per_second"] = num_bytes / per_step / 1e9
    return figures


def matmul_operations(config: ModelConfig, num_tokens: int, num_heads: int) -> int:
    """Multiplications and additions of the weights: every token through the layers, ``num_heads`` through the head."""
    attention = 2 * config.hidden_size * config.head_size * (config.num_heads + config.num_kv_heads)
    mlp = 3 * config.hidden_size * config.intermediate_size
    head = config.vocab_size * config.hidden_size
    return 2 * (num_tokens * config.num_layers * (attention + mlp) + num_heads * head)


def decode_weight_bytes(model: Model) -> int:
    """Bytes of weights that one decode step reads: all but the look-up in an untied embedding."""
    config = model.config
    embedding = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size * model.dtype.itemsize
    return model.weight_bytes - embedding


def kv_bytes_per_token(model: Model) -> int:
    """Bytes of keys and values that one token keeps in all layers."""
    return model_block_bytes(1, model)


def offline_rows(figures: dict[str, Any]) -> list[list[str]]:
    """The figures as a table."""
    rows = [["model", str(figures["model"])], ["device", f"{figures['device']}, {figures['dtype']}"]]
    return rows + [[label, f"{figures[name]:.2f}"] for name, label in _LABELS.items() if name in figures]


class OfflineBench:
    """One engine and seeded random prompts; no prompt comes twice, so that the prefix cache serves none.

    ``parts``: a model that is in memory already, in place of the config's.
    """

    def __init__(self, config: EngineConfig, parts: CoreParts | None = None) -> None:
        parts = parts or load_parts(config)
        self.model = parts.model
        self._core = EngineCore.from_parts(
            config, parts.model, parts.platform, parts.kernels, vocab_size=parts.vocab_size
        )
        self._vocabulary = self._core.info().vocab_size
        self._rng = random.Random(config.seed)
        self._names = itertools.count()
        self.run(1, 8, 2)

    def run(self, num_prompts: int, input_len: int, output_len: int) -> tuple[float, float]:
        """Complete ``num_prompts`` prompts together, greedily and to the full length.

        Seconds until every request had its first token, and until all were done.
        """
        params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True, seed=0)
        requests = [self._request(input_len, params) for _ in range(num_prompts)]
        waiting = {request.request_id for request in requests}
        start = first = time.perf_counter()
        for request in requests:
            self._core.add_request(request)
        while self._core.has_work():
            outputs = self._core.step()
            if waiting:
                waiting.difference_update(output.request_id for output in outputs if output.token_ids)
                first = time.perf_counter()
        return first - start, time.perf_counter() - start

    def _request(self, input_len: int, params: SamplingParams) -> EngineRequest:
        prompt = [self._rng.randrange(self._vocabulary) for _ in range(input_len)]
        return EngineRequest(request_id=f"bench-{next(self._names)}", prompt_token_ids=prompt, params=params)

    def describe(self, kind: str, args: argparse.Namespace) -> dict[str, Any]:
        """What was measured: engine and shape."""
        info = self._core.info()
        names = ("batch_size", "num_prompts", "input_len", "output_len", "iterations")
        shape = {name: getattr(args, name) for name in names if hasattr(args, name)}
        return {"kind": kind, "model": info.model_name, "device": info.device, "dtype": info.dtype, **shape}
