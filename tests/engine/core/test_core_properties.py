"""Any mixture of requests, steps and aborts: blocks are conserved, answers are right, nobody starves."""

from __future__ import annotations

from typing import Any

import pytest
from fake_core import (
    FakeModel,
    KeyRecorder,
    check_blocks,
    check_idle,
    drain,
    expected_greedy,
    join,
    make_core,
    make_request,
    run,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from twofold.engine.messages import AbortRequest, TokenOutput

MODEL = FakeModel()
COMMON = [2 + i * 11 % 60 for i in range(40)]

requests = st.fixed_dictionaries(
    {
        "common": st.integers(0, 24),
        "own": st.lists(st.integers(2, 5), min_size=1, max_size=16),
        "n": st.sampled_from([1, 1, 1, 2, 3]),
        "max_tokens": st.integers(1, 20),
        "seed": st.sampled_from([None, 7]),
        "prompt_logprobs": st.sampled_from([None, None, 1]),
    }
)
actions = st.lists(
    st.one_of(
        st.tuples(st.just("add"), requests),
        st.tuples(st.just("step"), st.integers(1, 4)),
        st.tuples(st.just("abort"), st.tuples(st.integers(0, 12), st.sampled_from([None, 0, 1]))),
    ),
    min_size=4,
    max_size=25,
)
engines = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(16, 28),
        "max_num_batched_tokens": st.sampled_from([1, 3, 8, 64]),
        "max_num_seqs": st.integers(1, 6),
        "enable_prefix_caching": st.booleans(),
    }
)


def request_of(name: str, spec: dict[str, Any]) -> Any:
    seeded = spec["seed"] is not None
    return make_request(
        name,
        COMMON[: spec["common"]] + spec["own"],
        n=spec["n"],
        max_tokens=spec["max_tokens"],
        prompt_logprobs=spec["prompt_logprobs"],
        **({"seed": spec["seed"], "temperature": 1.0} if seeded else {}),
    )


@given(options=engines, script=actions)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_mixture(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], script: list[tuple[str, Any]]) -> None:
    with monkeypatch.context() as patch:
        recorder = KeyRecorder(patch)
        core = make_core(MODEL, **options)
        specs: dict[str, dict[str, Any]] = {}
        aborted: set[tuple[str, int | None]] = set()
        out: dict[tuple[str, int], TokenOutput] = {}
        for action, value in script:
            if action == "add":
                name = str(len(specs))
                specs[name] = value
                core.add_request(request_of(name, value))
            elif action == "abort":
                core.abort(AbortRequest(request_id=str(value[0]), index=value[1]))
                aborted.add((str(value[0]), value[1]))
            else:
                for _ in range(value):
                    for output in core.step():
                        join(out, output)
                    check_blocks(core)
                recorder.check(core)
        while core.has_work():
            for output in core.step():
                join(out, output)
        check_idle(core)
        recorder.check(core)
        check_outputs(specs, aborted, out)


def check_outputs(
    specs: dict[str, dict[str, Any]], aborted: set[tuple[str, int | None]], out: dict[tuple[str, int], TokenOutput]
) -> None:
    """Every sample has ended; what was not aborted is complete and equals the lone answer."""
    for name, spec in specs.items():
        prompt = COMMON[: spec["common"]] + spec["own"]
        lone = run(make_core(MODEL), request_of("lone", spec)) if spec["seed"] is not None else {}
        for index in range(spec["n"]):
            output = out[name, index]
            if spec["seed"] is None:
                expected = expected_greedy(MODEL, prompt, spec["max_tokens"])
            else:
                expected = lone["lone", index].token_ids
            if output.finish_reason == "abort":
                assert (name, None) in aborted or (name, index) in aborted
                assert output.token_ids == expected[: len(output.token_ids)]
            else:
                assert output.finish_reason == "length" and output.token_ids == expected
                has_logprobs = spec["prompt_logprobs"] is not None and index == 0
                assert (output.prompt_logprobs is not None) == has_logprobs
                assert not has_logprobs or len(output.prompt_logprobs or []) == len(prompt)


@given(prompts=st.lists(st.integers(1, 40), min_size=2, max_size=8), num_blocks=st.integers(15, 22))
@settings(max_examples=25, deadline=None)
def test_nobody_starves(prompts: list[int], num_blocks: int) -> None:
    """Newcomers keep coming, yet every early request ends within a bound that does not depend on them."""
    core = make_core(MODEL, num_blocks=num_blocks, max_num_batched_tokens=16, max_num_seqs=4)
    work = 0
    for index, length in enumerate(prompts):
        core.add_request(make_request(f"early{index}", COMMON[:length], max_tokens=18))
        work += length // 16 + 1 + 18
    pending = {f"early{index}" for index in range(len(prompts))}
    for step in range(2 * work):
        core.add_request(make_request(f"late{step}", [2 + step % 60] * 9, max_tokens=3))
        pending -= {output.request_id for output in core.step() if output.finish_reason}
        if not pending:
            break
    assert not pending
    drain(core)
    check_idle(core)
