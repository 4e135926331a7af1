"""Recorded decode steps against the same steps operation by operation: not the least bit may differ."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_core import check_idle, run
from numpy.typing import NDArray
from twofold.engine.config import EngineConfig
from twofold.engine.core.batch import Batch
from twofold.engine.core.decode_graphs import DecodeOutputs
from twofold.engine.core.engine_core import EngineCore
from twofold.engine.core.loading import CoreParts, load_parts
from twofold.engine.core.runner import StepResult
from twofold.engine.core.step_plan import StepPlan
from twofold.engine.layers import rope
from twofold.engine.messages import EngineRequest, TokenOutput
from twofold.engine.sampling_params import SamplingParams
from twofold.kernels.cpu.library import unavailable
from twofold.platforms import cpu_threads

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=f"no compiled kernels: {unavailable()}")

TinyModel = Callable[..., Path]
FAMILIES = [
    "llama", "llama-tied", "llama-bias", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "phi3",
    "phi3-longrope", "mixtral", "qwen2-moe", "qwen3-moe", "olmoe",
]  # fmt: skip


def parts_of(model: Path, **options: Any) -> CoreParts:
    return load_parts(EngineConfig(model=str(model), device="cpu", num_threads=2, **options))


def core_of(parts: CoreParts, model: Path, **options: Any) -> EngineCore:
    config = EngineConfig(**{"model": str(model), "device": "cpu", "max_num_seqs": 24, **options})
    return EngineCore.from_parts(config, parts.model, parts.platform, parts.kernels, vocab_size=parts.vocab_size)


def request(index: int, prompt: list[int], **params: Any) -> EngineRequest:
    options = {"max_tokens": 2 + index, "ignore_eos": True, "seed": index, "temperature": (0.0, 1.0)[index % 2]}
    return EngineRequest(request_id=str(index), prompt_token_ids=prompt, params=SamplingParams(**{**options, **params}))


def mixed(count: int, **params: Any) -> list[EngineRequest]:
    """Prompts of mixed length; each lives a step longer than the one before, so a batch shrinks row by row."""
    return [
        request(index, [(7 * index + 3 * place) % 256 for place in range((1, 15, 16, 33, 70)[index % 5])], **params)
        for index in range(count)
    ]


def check_replays(core: EngineCore) -> list[tuple[int, int]]:
    """Compare replays with the model itself, and what both leave in the caches; the (rows, rows of the graph)."""
    runner, graphs, model, caches = core._runner, core._graphs, core._model, core._caches
    assert graphs is not None
    replay, run_graph = runner._replay, graphs.run
    seen: list[tuple[int, int]] = []
    wanted: list[tuple[torch.Tensor, list[torch.Tensor]]] = []

    def contents() -> list[torch.Tensor]:
        return [part.clone(memory_format=torch.contiguous_format) for cache in caches for part in cache.tensors]

    def one_by_one(plan: StepPlan) -> StepResult | None:
        inputs = runner._batch.inputs(plan, torch.device("cpu"))
        hidden = model.forward(inputs.input_ids, inputs.positions, caches, inputs.attention)
        wanted.append((model.compute_logits(hidden).clone(), contents()))
        return replay(plan)

    def checked(batch: Batch, rows: NDArray[np.int64]) -> DecodeOutputs:
        outputs = run_graph(batch, rows)
        logits, written = wanted[-1]
        assert torch.equal(outputs.logits, logits)
        assert torch.equal(outputs.tokens, logits[:, : core._vocab_size].argmax(-1))
        for before, after in zip(written, contents(), strict=True):
            assert torch.equal(before.view(torch.uint8), after.view(torch.uint8)), "a replay wrote what it must not"
        seen.append((len(rows), graphs._recorder.rows_for(len(rows))))
        return outputs

    runner._replay = one_by_one  # type: ignore[method-assign]
    graphs.run = checked  # type: ignore[method-assign]
    return seen


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_with_and_without_padding(tiny_model: TinyModel, family: str) -> None:
    model = tiny_model(family)
    parts = parts_of(model)
    core = core_of(parts, model)
    seen = check_replays(core)
    run(core, *mixed(19))
    assert (19, 20) in seen and (17, 18) in seen and (16, 16) in seen and (1, 1) in seen
    assert core.graphs.refused is None and core.graphs.num_replays == len(seen)
    assert core.graphs.num_graphs == len({rows for _, rows in seen}) and core.graphs.num_bytes > 0
    check_idle(core)


@pytest.mark.parametrize("options", [{"kv_cache_dtype": "int8"}, {"kv_cache_dtype": "fp8"}, {"quantization": "int4"}])
def test_eight_bit_caches_and_low_bits(tiny_model: TinyModel, options: dict[str, str]) -> None:
    model = tiny_model("llama")
    core = core_of(parts_of(model, **options), model, **options)
    seen = check_replays(core)
    run(core, *mixed(19))
    assert (17, 18) in seen and core.graphs.refused is None


def test_tokens_are_those_of_an_engine_without_graphs_on_any_number_of_threads(tiny_model: TinyModel) -> None:
    model = tiny_model("llama")
    parts = parts_of(model)
    eager = core_of(parts, model, enforce_eager=True)
    expected = run(eager, *mixed(9, logprobs=3))
    assert eager.graphs.num_graphs == 0 and "enforce_eager" in str(eager.graphs.refused)
    before = cpu_threads.num_threads()
    try:
        for threads in (1, 3):
            cpu_threads.set_num_threads(threads)
            core = core_of(parts, model)
            assert run(core, *mixed(9, logprobs=3)) == expected
            assert core.graphs.num_replays > 0
    finally:
        cpu_threads.set_num_threads(before)


def test_prefix_cache_parallel_samples_and_preemption(tiny_model: TinyModel) -> None:
    model = tiny_model("llama")
    core = core_of(parts_of(model), model, kv_cache_bytes=9 * 2 * 2 * 16 * 2 * 16 * 4, max_num_batched_tokens=48)
    seen = check_replays(core)
    shared = [place % 256 for place in range(40)]
    requests = [request(index, [*shared, index], max_tokens=40, n=1 + index % 2) for index in range(4)]
    run(core, *requests)
    assert core.stats().num_preemptions > 0 and core.stats().num_cached_tokens > 0
    assert len(seen) > 40


def test_a_longer_sequence_has_graphs_recorded_anew(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rope, "_FIRST_ROWS", 32)
    model = tiny_model("llama")
    core = core_of(parts_of(model), model)
    seen = check_replays(core)
    run(core, request(0, [1, 2, 3], max_tokens=80), request(1, list(range(100)), max_tokens=30))
    assert core._graphs is not None
    assert len(seen) == 79 and core._graphs._reach == 256, "tables of 32, 128 and 256 positions"


def test_dynamic_scaling_beyond_the_trained_length_is_not_recorded(tiny_model: TinyModel) -> None:
    model = tiny_model("llama-dynamic", max_position_embeddings=32)
    parts = parts_of(model, max_model_len=64)
    core = core_of(parts, model, max_model_len=64)
    seen = check_replays(core)
    run(core, request(0, list(range(10)), max_tokens=50))
    assert len(seen) == 32 - 10 and core.graphs.refused is None
    run(core, request(1, list(range(10)), max_tokens=5))
    assert len(seen) == 32 - 10 + 4, "shorter sequences are replayed again"


def test_a_model_that_cannot_be_recorded_says_why_once(tiny_model: TinyModel, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model("llama")
    parts = parts_of(model, dtype="float16")
    core = core_of(parts, model, dtype="float16")
    with caplog.at_level(logging.INFO):
        out = run(core, *mixed(3))
    assert len(out) == 3 and all(output.token_ids for output in out.values())
    assert "embedding of torch.float16" in str(core.graphs.refused) and core.graphs.num_replays == 0
    assert caplog.text.count("are not recorded") == 1


def vector(out: dict[tuple[str, int], TokenOutput]) -> torch.Tensor:
    embedding = out["e", 0].embedding
    assert embedding is not None
    return torch.frombuffer(bytearray(embedding), dtype=torch.float32)


def test_embeddings_run_beside_recorded_steps(tiny_model: TinyModel) -> None:
    """What a pooling request has seen is not overwritten by a replay."""
    model = tiny_model("llama")
    config = EngineConfig(model=str(model), device="cpu", num_threads=1, max_num_batched_tokens=9, max_num_seqs=24)
    alone = EngineCore(EngineConfig(model=str(model), device="cpu", num_threads=1))
    for pooling in ("last", "mean"):
        wanted = EngineRequest(
            request_id="e", prompt_token_ids=list(range(30)), params=SamplingParams(), pooling=pooling
        )
        core = EngineCore(config)
        both = run(core, *mixed(8), wanted)
        assert core.graphs.num_replays > 0
        assert torch.allclose(vector(both), vector(run(alone, wanted)), atol=1e-5)
