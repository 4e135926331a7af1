"""The scheduler's decisions, and that none of them shows in the tokens."""

from __future__ import annotations

import pytest
from fake_core import EOS, FakeModel, check_blocks, check_idle, drain, expected_greedy, make_core, make_request, run
from twofold.engine.core.engine_core import EngineCore
from twofold.engine.core.step_plan import StepPlan
from twofold.engine.messages import AbortRequest
from twofold.errors import ContextLengthError


def prompt_of(length: int, salt: int = 0) -> list[int]:
    """A prompt that shares no block with one of another salt."""
    return [2 + (i * 7 + salt * 13 + (i * salt) % 5) % 60 for i in range(length)]


def record_plans(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> list[StepPlan]:
    """All plans from now on."""
    plans: list[StepPlan] = []
    schedule = core._scheduler.schedule

    def recording() -> StepPlan:
        plans.append(schedule())
        return plans[-1]

    monkeypatch.setattr(core._scheduler, "schedule", recording)
    return plans


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33])
def test_chunks_do_not_show(length: int, monkeypatch: pytest.MonkeyPatch) -> None:  # B044
    model = FakeModel()
    core = make_core(model, max_num_batched_tokens=16, enable_prefix_caching=False)
    plans = record_plans(core, monkeypatch)
    core.add_request(make_request("old", prompt_of(5, 1), max_tokens=30))
    core.step()
    out = run(core, make_request("new", prompt_of(length), max_tokens=7))
    assert out["new", 0].token_ids == expected_greedy(model, prompt_of(length), 7)
    assert all(sum(plan.num_tokens.values()) <= 16 for plan in plans)
    mixed = [plan.num_tokens for plan in plans if len(plan.num_tokens) == 2]
    assert mixed[0] == {("old", 0): 1, ("new", 0): min(15, length)}
    assert sum(plan.num_tokens.get(("new", 0), 0) for plan in plans) == length + 6


def test_running_first_then_waiting_in_order_of_arrival(monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_core(max_num_batched_tokens=10, max_num_seqs=3)
    plans = record_plans(core, monkeypatch)
    for index in range(4):
        core.add_request(make_request(str(index), prompt_of(6, index + 1), max_tokens=2))
    drain(core)
    assert [list(plan.num_tokens.items()) for plan in plans[:4]] == [
        [(("0", 0), 6), (("1", 0), 4)],
        [(("0", 0), 1), (("1", 0), 2), (("2", 0), 6)],
        [(("1", 0), 1), (("2", 0), 1), (("3", 0), 6)],
        [(("3", 0), 1)],
    ]


def test_preemption_is_invisible() -> None:  # B036
    model = FakeModel()
    lone = {}
    requests = {}
    for index in range(4):
        for kind, params in (("greedy", {}), ("seeded", {"seed": 7, "temperature": 1.0})):
            name = f"{kind}{index}"
            requests[name] = lambda name=name, index=index, params=params: make_request(
                name, prompt_of(40, index), max_tokens=60, logprobs=1, **params
            )
            lone[name] = run(make_core(model, num_blocks=100), requests[name]())[name, 0]
    for kind in ("greedy", "seeded"):
        core = make_core(model, num_blocks=50, max_num_batched_tokens=64)
        names = [f"{kind}{index}" for index in range(4)]
        out = run(core, *(requests[name]() for name in names))
        assert core.stats().num_preemptions > 0
        for name in names:
            whole = out[name, 0]
            assert whole.token_ids == lone[name].token_ids and len(whole.token_ids) == 60
            assert whole.finish_reason == "length"
            assert whole.logprobs is not None and lone[name].logprobs is not None
            for mine, other in zip(whole.logprobs, lone[name].logprobs, strict=True):
                assert mine.token_id == other.token_id and mine.logprob == pytest.approx(other.logprob, abs=1e-4)
        check_idle(core)


def test_the_oldest_is_never_preempted_and_nobody_starves(monkeypatch: pytest.MonkeyPatch) -> None:
    model = FakeModel()
    core = make_core(model, num_blocks=12, max_num_batched_tokens=32, enable_prefix_caching=False)
    plans = record_plans(core, monkeypatch)
    prompts = [prompt_of(10 + index, index) for index in range(6)]
    out = run(core, *(make_request(str(i), prompt, max_tokens=20) for i, prompt in enumerate(prompts)), max_steps=400)
    for index, prompt in enumerate(prompts):
        assert out[str(index), 0].token_ids == expected_greedy(model, prompt, 20)
    assert core.stats().num_preemptions > 0
    assert all(plan.num_tokens for plan in plans), "a step with work to do computed nothing"
    assert sum(plan.num_tokens.get(("0", 0), 0) for plan in plans) == 10 + 19  # nothing of it was computed twice
    check_idle(core)


def test_a_resumed_sample_finds_its_own_blocks() -> None:
    model = FakeModel()
    core = make_core(model, num_blocks=14, max_num_batched_tokens=64)
    out = run(core, *(make_request(str(i), prompt_of(20, i), max_tokens=24) for i in range(2)))
    assert core.stats().num_preemptions > 0
    assert all(out[str(i), 0].token_ids == expected_greedy(model, prompt_of(20, i), 24) for i in range(2))
    assert all(out[str(i), 0].num_cached_tokens == 0 for i in range(2))  # what the client sees is the first start


@pytest.mark.parametrize("num_blocks", [1, 2, 5])
def test_capacity_edge(num_blocks: int) -> None:  # B035
    model = FakeModel()
    core = make_core(model, num_blocks=num_blocks, block_size=16)
    tokens = 16 * num_blocks
    assert core.info().num_blocks == num_blocks and core.info().max_model_len == tokens
    out = run(core, make_request("fits", prompt_of(tokens - 1), max_tokens=1))
    assert out["fits", 0].token_ids == expected_greedy(model, prompt_of(tokens - 1), 1)
    for length in (tokens, tokens + 1):
        with pytest.raises(ContextLengthError, match=rf"{length} tokens.*{tokens} tokens"):
            core.add_request(make_request("long", prompt_of(length), max_tokens=1))
    check_idle(core)


def test_output_ends_at_the_longest_sequence() -> None:
    model = FakeModel()
    core = make_core(model, max_model_len=20)
    for name, max_tokens in (("none", None), ("huge", 1000)):
        out = run(core, make_request(name, prompt_of(12), max_tokens=max_tokens))[name, 0]
        assert out.token_ids == expected_greedy(model, prompt_of(12), 8) and out.finish_reason == "length"


def test_accounting_does_not_drift() -> None:  # B042
    model = FakeModel()
    core = make_core(model, num_blocks=24, max_num_batched_tokens=24, max_num_seqs=6)
    common = prompt_of(9)
    rejected = 0
    for index in range(500):
        prompt = (common if index % 2 else []) + prompt_of(1 + index % 17, index)
        try:
            core.add_request(
                make_request(str(index), prompt * (9 if index % 50 == 49 else 1), max_tokens=1 + index % 40)
            )
        except ContextLengthError:
            rejected += 1
        if index % 3 == 0:
            core.abort(AbortRequest(request_id=str(index - index % 5)))
        if index % 2:
            core.step()
        stats = core.stats()
        assert 0 <= stats.num_live_blocks <= stats.num_blocks
    drain(core)
    assert rejected > 0 and core.stats().num_preemptions > 0
    check_idle(core)
    whole = prompt_of(24 * 4 - 1, 3)
    assert run(core, make_request("whole", whole, max_tokens=1))["whole", 0].token_ids == expected_greedy(
        model, whole, 1
    )


class TestParallelSampling:
    def test_the_prompt_is_computed_once_and_shared(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = FakeModel()
        core = make_core(model, enable_prefix_caching=False)
        plans = record_plans(core, monkeypatch)
        prompt = prompt_of(18)
        core.add_request(make_request("r", prompt, n=4, max_tokens=5))
        core.step()
        core.step()
        check_shared(core, num_samples=4, num_full=4)
        out = drain(core)
        assert [plan.num_tokens for plan in plans[:2]] == [{("r", 0): 17}, {("r", i): 1 for i in range(4)}]
        assert len(plans[1].block_copies) == 3
        assert all(out["r", index].token_ids == expected_greedy(model, prompt, 5)[1:] for index in range(4))
        assert model.num_computed == 17 + 4 * 5
        check_idle(core)

    @pytest.mark.parametrize("length", [1, 2, 4, 5, 8, 9])
    @pytest.mark.parametrize("caching", [True, False])
    def test_any_prompt_length(self, length: int, caching: bool) -> None:
        model = FakeModel()
        core = make_core(model, enable_prefix_caching=caching)
        for name in "ab":
            out = run(core, make_request(name, prompt_of(length), n=3, max_tokens=9))
            assert all(out[name, i].token_ids == expected_greedy(model, prompt_of(length), 9) for i in range(3))
        check_idle(core)

    def test_more_samples_than_rows(self) -> None:
        model = FakeModel()
        core = make_core(model, max_num_seqs=2)
        out = run(core, make_request("r", prompt_of(10), n=7, max_tokens=6))
        assert [out["r", i].token_ids for i in range(7)] == [expected_greedy(model, prompt_of(10), 6)] * 7
        check_idle(core)

    def test_siblings_go_on_when_the_leader_is_aborted(self) -> None:
        model = FakeModel()
        for steps in range(4):
            core = make_core(model, max_num_batched_tokens=8)
            core.add_request(make_request("r", prompt_of(18), n=3, max_tokens=6))
            outputs = [output for _ in range(steps) for output in core.step()]
            core.abort(AbortRequest(request_id="r", index=0))
            check_blocks(core)
            out = drain(core)
            for index in (1, 2):
                early = [t for o in outputs if o.index == index for t in o.token_ids]
                assert early + out["r", index].token_ids == expected_greedy(model, prompt_of(18), 6)
            check_idle(core)

    def test_with_preemptions(self) -> None:
        model = FakeModel()
        core = make_core(model, num_blocks=20, max_num_batched_tokens=16)
        requests = [make_request(str(i), prompt_of(14, i), n=3, max_tokens=25) for i in range(3)]
        out = run(core, *requests)
        assert core.stats().num_preemptions > 0 and len(out) == 9
        for (name, _), output in out.items():
            assert output.token_ids == expected_greedy(model, prompt_of(14, int(name)), 25)
        check_idle(core)

    def test_seeded_samples_differ_and_repeat(self) -> None:  # B050
        def texts() -> list[list[int]]:
            out = run(make_core(), make_request("r", prompt_of(10), n=3, max_tokens=12, seed=42, temperature=1.0))
            return [out["r", index].token_ids for index in range(3)]

        first = texts()
        assert first == texts() and len({tuple(tokens) for tokens in first}) == 3


def check_shared(core: EngineCore, *, num_samples: int, num_full: int) -> None:
    """The samples hold the same full blocks and each its own partial one."""
    tables = [sample.blocks for sample in core._scheduler.running]
    assert len(tables) == num_samples
    assert len({tuple(table[:num_full]) for table in tables}) == 1
    assert len({table[num_full] for table in tables}) == num_samples
    assert all(core._pool.references(block) == num_samples for block in tables[0][:num_full])
    check_blocks(core)


def test_end_of_text_and_stop_ids() -> None:
    model = FakeModel()
    expected = expected_greedy(model, prompt_of(9), 200, stop={EOS})
    core = make_core(model)
    out = run(core, make_request("r", prompt_of(9), max_tokens=200, ignore_eos=False))["r", 0]
    assert expected[-1] == EOS and out.token_ids == expected
    assert (out.finish_reason, out.stop_token) == ("stop", EOS)
    stop = expected[3]
    out = run(core, make_request("s", prompt_of(9), max_tokens=200, stop_token_ids=(stop,)))["s", 0]
    assert out.token_ids == expected[: expected.index(stop) + 1] and out.stop_token == stop
