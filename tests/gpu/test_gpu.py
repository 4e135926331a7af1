"""On a machine with a GPU: every kernel that can run there is right, and the engine answers as it does on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU"),
]


def test_every_kernel_is_right() -> None:
    from twofold.cli.kernel_check import check_kernels
    from twofold.platforms import select_platform

    rows = check_kernels(select_platform("auto"))
    assert rows and [row for row in rows if row["status"] == "wrong"] == []


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_logits_and_tokens_are_those_of_the_cpu(family: str, tiny_model: Callable[..., Path]) -> None:
    model = tiny_model(family)
    prompts = [[(7 * index + 3 * place) % 250 + 5 for place in range(4 + 5 * index)] for index in range(6)]
    logits, tokens = {}, {}
    for device in ("cpu", "auto"):
        core = make_core(model, device)
        logits[device] = core.logits(prompts[-1]).cpu()
        tokens[device] = greedy(core, prompts)
        core.shutdown()
    assert (logits["cpu"] - logits["auto"]).abs().max() < 1e-3
    assert tokens["cpu"] == tokens["auto"]


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma2", "qwen2-moe"])
def test_recorded_steps_give_the_tokens_of_others(family: str, tiny_model: Callable[..., Path]) -> None:
    """Nine requests, so that the graph has rows of padding."""
    model = tiny_model(family)
    prompts = [[(7 * index + 3 * place) % 250 + 5 for place in range(4 + 5 * index)] for index in range(9)]
    recorded, eager = make_core(model, "auto"), make_core(model, "auto", enforce_eager=True)
    assert greedy(recorded, prompts) == greedy(eager, prompts)
    assert recorded.graphs.refused is None and recorded.graphs.num_replays > 0 and eager.graphs.num_replays == 0


def make_core(model: Path, device: str, **options: Any) -> Any:
    from twofold.engine.config import EngineConfig
    from twofold.engine.core.engine_core import EngineCore

    # float32 without tensor-float-32, so that only the order of sums differs between the two.
    torch.backends.cuda.matmul.allow_tf32 = False
    return EngineCore(EngineConfig(model=str(model), device=device, dtype="float32", kv_cache_bytes=1 << 26, **options))


def greedy(core: Any, prompts: list[list[int]]) -> dict[str, list[int]]:
    from twofold.engine.messages import EngineRequest
    from twofold.engine.sampling_params import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, seed=0)
    results: dict[str, list[int]] = {}
    for index, prompt in enumerate(prompts):
        results[str(index)] = []
        core.add_request(EngineRequest(request_id=str(index), prompt_token_ids=prompt, params=params))
    while core.has_work():
        for output in core.step():
            results[output.request_id] += output.token_ids
    return results
