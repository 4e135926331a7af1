"""Vectors of prompts from the core: right in chunks, after preemption, and beside the prefix cache."""

from __future__ import annotations

import struct

import pytest
import torch
from fake_core import FakeModel, _states, check_idle, make_core, make_request, run
from twofold.engine.core.pooler import Pooler
from twofold.engine.messages import EngineRequest
from twofold.errors import RequestError

PROMPT = [5, 9, 14, 3, 22, 31, 7, 7, 40, 2, 19]


def pooling_request(name: str, prompt: list[int], pooling: str) -> EngineRequest:
    request = make_request(name, prompt, max_tokens=1)
    request.pooling = pooling
    return request


def expected(prompt: list[int], pooling: str) -> float:
    """The fake model's hidden state is its hash's state, one number."""
    states = _states(prompt)
    return {"last": states[-1], "cls": states[0], "mean": sum(states) / len(states)}[pooling]


@pytest.mark.parametrize("pooling", ["last", "mean", "cls"])
@pytest.mark.parametrize("budget", [3, 64])
def test_chunks_and_the_prefix_cache(pooling: str, budget: int) -> None:
    core = make_core(max_num_batched_tokens=budget)
    run(core, make_request("warm", PROMPT, max_tokens=2))
    for name, prompt in (("same", PROMPT), ("longer", [*PROMPT, 1, 2])):
        output = run(core, pooling_request(name, prompt, pooling))[name, 0]
        assert output.finish_reason == "stop" and output.token_ids == []
        assert output.embedding is not None
        assert struct.unpack("<f", output.embedding)[0] == pytest.approx(expected(prompt, pooling), rel=1e-6)
        assert (output.num_cached_tokens > 0) == (pooling == "last")
    check_idle(core)


def test_beside_generation_and_under_preemption() -> None:
    """A pool too small for all: what is put back computes its prompt again and ends with the same vector."""
    model = FakeModel()
    core = make_core(model, num_blocks=9, max_num_batched_tokens=5)
    requests = [make_request(f"g{i}", [i + 1] * 6, max_tokens=10) for i in range(2)]
    requests += [pooling_request(f"p{i}", [i + 3, *PROMPT], "mean") for i in range(3)]
    outputs = run(core, *requests)
    for i in range(3):
        embedding = outputs[f"p{i}", 0].embedding
        assert embedding is not None
        assert struct.unpack("<f", embedding)[0] == pytest.approx(expected([i + 3, *PROMPT], "mean"), rel=1e-6)
    alone = run(make_core(model), make_request("g0", [1] * 6, max_tokens=10))
    assert outputs["g0", 0].token_ids == alone["g0", 0].token_ids
    check_idle(core)


def test_a_vector_that_is_not_finite_is_an_error() -> None:
    model = FakeModel()
    core = make_core(model)
    forward = model.forward
    model.forward = lambda *args: forward(*args) * float("nan")  # type: ignore[method-assign]
    output = run(core, pooling_request("p", PROMPT, "mean"))["p", 0]
    assert (output.finish_reason, output.embedding) == ("error", None) and output.error
    check_idle(core)


def test_refused() -> None:
    core = make_core()
    with pytest.raises(RequestError, match="median"):
        core.add_request(pooling_request("p", PROMPT, "median"))
    request = make_request("n", PROMPT, n=2)
    request.pooling = "last"
    with pytest.raises(RequestError, match="n is 2"):
        core.add_request(request)
    assert not core.has_work()


@pytest.mark.parametrize("pooling", ["last", "mean", "cls"])
def test_cuts_change_no_bit(pooling: str) -> None:
    hidden = torch.randn(600, 40, generator=torch.Generator().manual_seed(1))
    vectors = set()
    for size in (600, 64, 63, 1):
        pooler = Pooler(pooling, len(hidden))
        for first in range(0, len(hidden), size):
            start, count = pooler.rows(first, len(hidden[first : first + size]))
            if count:
                pooler.add(hidden[first + start : first + start + count], first)
        vectors.add(pooler.result())
    expected = {"last": hidden[-1], "mean": hidden.mean(dim=0, dtype=torch.float64), "cls": hidden[0]}[pooling]
    assert vectors == {expected.float().numpy().tobytes()}
