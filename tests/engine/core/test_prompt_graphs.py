"""Recorded steps with prompts against the same steps operation by operation: not the least bit may differ."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from arithmetic import OTHER_ARITHMETIC
from fake_core import check_idle, run
from tiny_models import FAMILIES
from twofold.engine.config import EngineConfig
from twofold.engine.core.engine_core import EngineCore
from twofold.engine.core.loading import CoreParts, load_parts
from twofold.engine.core.prompt_graphs import PromptGraphs
from twofold.engine.layers import rope
from twofold.engine.messages import EngineRequest, TokenOutput
from twofold.engine.sampling_params import SamplingParams
from twofold.kernels.cpu.library import unavailable

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=f"no compiled kernels: {unavailable()}")

TinyModel = Callable[..., Path]
LENGTHS = (1, 70, 160, 33, 250, 64, 65)


def parts_of(model: Path, **options: Any) -> CoreParts:
    return load_parts(EngineConfig(model=str(model), device="cpu", dtype="float32", num_threads=2, **options))


def core_of(parts: CoreParts, model: Path, **options: Any) -> EngineCore:
    given = {"max_num_batched_tokens": 170, "max_num_seqs": 6, **options}
    config = EngineConfig(model=str(model), device="cpu", dtype="float32", **given)
    return EngineCore.from_parts(config, parts.model, parts.platform, parts.kernels, vocab_size=parts.vocab_size)


def requests(**params: Any) -> list[EngineRequest]:
    """Prompts of mixed length, cut into chunks and beside requests that draw."""
    options = {"ignore_eos": True, "temperature": 0.0, "logprobs": 2, **params}
    return [
        EngineRequest(
            request_id=str(index),
            prompt_token_ids=[(7 * index + 3 * place + place // 5) % 250 for place in range(length)],
            params=SamplingParams(**options, max_tokens=3 + index),
        )
        for index, length in enumerate(LENGTHS)
    ]


def graphs_of(core: EngineCore) -> PromptGraphs:
    assert core._prompt_graphs is not None
    return core._prompt_graphs


def compare(parts: CoreParts, model: Path, **options: Any) -> tuple[EngineCore, dict[tuple[str, int], TokenOutput]]:
    """Answers, and all that is left in the caches, with recorded steps and without."""
    eager, core = core_of(parts, model, enforce_eager=True, **options), core_of(parts, model, **options)
    for cache in (*eager._caches, *core._caches):
        for part in cache.tensors:
            part.zero_()
    expected, out = run(eager, *requests()), run(core, *requests())
    for output in (*expected.values(), *out.values()):
        output.queue_seconds = None
    assert out == expected
    for here, there in zip(core._caches, eager._caches, strict=True):
        for part, other in zip(here.tensors, there.tensors, strict=True):
            assert torch.equal(part.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
    check_idle(core)
    return core, out


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family(tiny_model: TinyModel, family: str) -> None:
    model = tiny_model(family)
    core, _ = compare(parts_of(model), model)
    assert graphs_of(core).refused is None and graphs_of(core).num_replays >= 3


@pytest.mark.parametrize("options", OTHER_ARITHMETIC)
def test_other_arithmetic(tiny_model: TinyModel, options: dict[str, str]) -> None:
    model = tiny_model("llama")
    core, _ = compare(parts_of(model, **options), model, **options)
    assert graphs_of(core).refused is None and graphs_of(core).num_replays >= 3


def test_a_longer_sequence_has_steps_recorded_anew(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rope, "_FIRST_ROWS", 128)
    model = tiny_model("llama")
    core, _ = compare(parts_of(model), model)
    assert graphs_of(core)._reach == 256 and graphs_of(core).num_replays >= 3


def test_small_steps_and_torchs_operations_are_not_recorded(tiny_model: TinyModel) -> None:
    model = tiny_model("llama")
    parts = parts_of(model)
    small = core_of(parts, model, max_num_batched_tokens=48)
    run(small, *requests())
    assert graphs_of(small).refused == "steps are small" and graphs_of(small).num_replays == 0
    config = EngineConfig(model=str(model), device="cpu", dtype="float16", num_threads=2, max_num_batched_tokens=170)
    half = EngineCore(config)
    assert all(output.token_ids for output in run(half, *requests()).values())
    assert "torch.float16" in str(graphs_of(half).refused) and graphs_of(half).num_replays == 0


def test_steps_are_recorded_before_the_first_request(tiny_model: TinyModel) -> None:
    core = EngineCore(EngineConfig(model=str(tiny_model("llama")), device="cpu", dtype="float32", num_threads=2))
    assert graphs_of(core)._graph is not None and graphs_of(core).num_replays == 0
