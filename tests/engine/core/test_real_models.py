"""Tiny random decoders through the whole core: no decision of the scheduler, cache or sampler shows in the tokens."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_core import check_idle, run
from tiny_models import judge, judge_logits
from twofold.engine.config import EngineConfig
from twofold.engine.core.engine_core import EngineCore
from twofold.engine.core.loading import load_parts
from twofold.engine.messages import EngineRequest, TokenOutput
from twofold.engine.sampling_params import SamplingParams

TinyModel = Callable[..., Path]
FAMILIES = ["llama", "mistral", "qwen3"]
BYTES_PER_BLOCK = 2 * 2 * 16 * 2 * 32 * 4  # keys and values, layers, tokens, KV heads, head size, float32


def core_of(model: Path, **options: Any) -> EngineCore:
    config = EngineConfig(model=str(model), device="cpu", dtype="float32", **{"num_threads": 1, **options})
    parts = load_parts(config)
    return EngineCore.from_parts(config, parts.model, parts.platform, parts.kernels, vocab_size=parts.vocab_size)


def seeded_requests(count: int, *, seed: int = 0, **params: Any) -> list[EngineRequest]:
    """Requests of mixed length; every third one is greedy, the others are drawn in different ways."""
    rng = random.Random(seed)
    kinds: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9}]
    requests = []
    for index in range(count):
        prompt = [rng.randrange(256) for _ in range(rng.choice([1, 3, 15, 16, 17, 40, 70]))]
        options = {"max_tokens": 24, "seed": index, "ignore_eos": True, "logprobs": 1, **kinds[index % 3], **params}
        requests.append(EngineRequest(request_id=str(index), prompt_token_ids=prompt, params=SamplingParams(**options)))
    return requests


def alone(core: EngineCore, requests: list[EngineRequest]) -> dict[tuple[str, int], TokenOutput]:
    out: dict[tuple[str, int], TokenOutput] = {}
    for request in requests:
        out |= run(core, request)
    return out


def assert_same(first: dict[tuple[str, int], TokenOutput], second: dict[tuple[str, int], TokenOutput]) -> None:
    assert first.keys() == second.keys()
    for key, output in first.items():
        assert output.token_ids == second[key].token_ids, key
        values = [entry.logprob for entry in output.logprobs or []]
        assert values == pytest.approx([entry.logprob for entry in second[key].logprobs or []], abs=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_thirty_two_together_equal_each_alone(tiny_model: TinyModel, family: str) -> None:
    model = tiny_model(family)
    requests = seeded_requests(32)
    together = core_of(model)
    joint = run(together, *requests)
    assert_same(joint, alone(core_of(model), requests))
    check_idle(together)
    reference = judge(model)
    vocab_size = together.info().vocab_size
    for request in requests[::3][:4]:  # the greedy ones against transformers
        tokens = request.prompt_token_ids + joint[request.request_id, 0].token_ids
        best = judge_logits(reference, tokens)[:, :vocab_size].argmax(-1).tolist()
        assert tokens[len(request.prompt_token_ids) :] == best[len(request.prompt_token_ids) - 1 : -1]


@pytest.mark.parametrize("options", [
    {"max_num_batched_tokens": 16},
    {"max_num_batched_tokens": 7},
    {"enable_prefix_caching": False},
    {"block_size": 8},
    {"max_num_seqs": 3},
])  # fmt: skip
def test_no_option_shows(tiny_model: TinyModel, options: dict[str, Any]) -> None:
    model = tiny_model("llama")
    requests = seeded_requests(12)
    assert_same(run(core_of(model, **options), *requests), run(core_of(model), *requests))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_pool_too_small(tiny_model: TinyModel, family: str) -> None:  # B036
    model = tiny_model(family)
    requests = seeded_requests(8, max_tokens=60)
    head_size = 16 if family == "llama" else 32
    tight = core_of(model, kv_cache_bytes=12 * BYTES_PER_BLOCK * head_size // 32)
    assert tight.info().num_blocks == 12
    out = run(tight, *requests)
    assert tight.stats().num_preemptions > 0
    assert_same(out, run(core_of(model), *requests))
    check_idle(tight)


def test_warm_cache_equals_cold(tiny_model: TinyModel) -> None:
    model = tiny_model("llama")
    core = core_of(model)
    requests = seeded_requests(9)
    cold = run(core, *requests)
    warm = run(core, *requests)
    assert_same(warm, cold)
    assert sum(output.num_cached_tokens for output in warm.values()) > 100
    assert all(output.num_cached_tokens == 0 for output in cold.values())


def test_parallel_sampling(tiny_model: TinyModel) -> None:
    model = tiny_model("llama")
    (request,) = seeded_requests(1, n=4, temperature=1.0)
    request.prompt_token_ids = list(range(37))
    core = core_of(model, enable_prefix_caching=False)
    core.add_request(request)
    core.step()
    core.step()
    tables = [sample.blocks for sample in core._scheduler.running]
    assert len(tables) == 4 and len({tuple(table[:2]) for table in tables}) == 1
    assert core.stats().num_live_blocks == 2 + 4
    assert len({table[2] for table in tables}) == 4
    drained = run(core)
    whole = run(core_of(model), request)
    assert all(whole["0", i].token_ids[1:] == drained["0", i].token_ids for i in range(4))
    assert len({tuple(whole["0", i].token_ids) for i in range(4)}) == 4


def test_logits(tiny_model: TinyModel) -> None:
    model = tiny_model("qwen2")
    tokens = [random.Random(1).randrange(256) for _ in range(90)]
    expected = judge_logits(judge(model), tokens)
    for budget in (1024, 32):
        logits = core_of(model, max_num_batched_tokens=budget).logits(tokens)
        assert logits.dtype == torch.float32 and (logits - expected).abs().max() < 1e-4


def test_prompt_logprobs_with_a_cache_and_chunks(tiny_model: TinyModel) -> None:  # B041
    model = tiny_model("llama")
    tokens = [random.Random(2).randrange(256) for _ in range(40)]
    core = core_of(model, max_num_batched_tokens=8)
    vocab_size = core.info().vocab_size
    expected = judge_logits(judge(model), tokens)[:, :vocab_size].log_softmax(-1)
    run(core, EngineRequest(request_id="w", prompt_token_ids=tokens, params=SamplingParams(max_tokens=1, seed=0)))
    for _ in range(2):
        params = SamplingParams(max_tokens=1, seed=0, temperature=0.0, prompt_logprobs=1)
        out = run(core, EngineRequest(request_id="p", prompt_token_ids=tokens, params=params))["p", 0]
        assert out.prompt_logprobs is not None and out.prompt_logprobs[0] is None
        values = [entry.logprob for entry in out.prompt_logprobs[1:] if entry is not None]
        assert values == pytest.approx([expected[i, tokens[i + 1]].item() for i in range(39)], abs=1e-4)
