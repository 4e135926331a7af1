"""The warm-up: its graph is there before the first request, which computes the same and finds counters at 0."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from fake_core import check_idle, run
from twofold.engine.config import EngineConfig
from twofold.engine.core import engine_core
from twofold.engine.core.engine_core import EngineCore
from twofold.engine.messages import EngineRequest, EngineStats
from twofold.engine.sampling_params import SamplingParams
from twofold.kernels.cpu.library import unavailable


@pytest.mark.parametrize("block_size", [1, 16])
def test_the_first_request_finds_all_made_and_nothing_left(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, block_size: int
) -> None:
    config = EngineConfig(
        model=str(tiny_model("llama")), device="cpu", num_threads=1, block_size=block_size, kv_cache_bytes=1 << 20
    )
    request = EngineRequest(
        request_id="a",
        prompt_token_ids=[0, 0, 0],
        params=SamplingParams(max_tokens=6, temperature=1, seed=7, ignore_eos=True),
    )
    warm = EngineCore(config)
    if unavailable() is None:
        assert warm.graphs.num_graphs == 1
    stats = warm.stats()
    assert (stats.num_steps, stats.num_generated_tokens, stats.num_prompt_tokens, stats.num_live_blocks) == (0, 0, 0, 0)
    tokens = run(warm, request)["a", 0].token_ids
    assert warm.stats().num_cached_tokens == 0
    check_idle(warm)
    monkeypatch.setattr(engine_core, "warm_up", lambda core: None)
    cold = EngineCore(config)
    assert cold.graphs.num_graphs == 0 and cold.stats() == EngineStats(num_blocks=stats.num_blocks)
    assert run(cold, request)["a", 0].token_ids == tokens
