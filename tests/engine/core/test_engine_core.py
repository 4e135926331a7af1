"""EngineCore: requests in, outputs out, aborts, errors, logits, prompt logprobs, figures."""

from __future__ import annotations

import pytest
import torch
from fake_core import (
    EOS,
    VOCAB_SIZE,
    FakeModel,
    check_idle,
    drain,
    expected_greedy,
    expected_logits,
    make_core,
    make_request,
    run,
)
from twofold.engine.messages import AbortRequest
from twofold.errors import ContextLengthError, RequestError

PROMPT = [2 + i * 7 % 60 for i in range(40)]


def test_info_and_stats() -> None:
    core = make_core(num_blocks=30, max_num_seqs=2)
    info = core.info()
    assert (info.model_name, info.vocab_size, info.block_size, info.num_blocks) == ("fake", VOCAB_SIZE, 4, 30)
    assert (info.max_model_len, info.device, info.dtype) == (120, "cpu", "float32")
    for index in range(3):
        core.add_request(make_request(str(index), PROMPT[index:], max_tokens=3))
    assert (core.stats().num_running, core.stats().num_waiting) == (0, 3)
    core.step()
    stats = core.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_live_blocks) == (2, 1, 20)
    assert (stats.num_prompt_tokens, stats.num_generated_tokens, stats.num_steps) == (40 + 39 + 38, 2, 1)
    drain(core)
    stats = core.stats()
    assert (stats.num_generated_tokens, stats.num_finished) == (9, 3)
    check_idle(core)


def test_a_request_that_cannot_be_computed_leaves_nothing() -> None:
    core = make_core()
    wrong = [
        (make_request("a", []), "empty"),
        (make_request("a", [5, VOCAB_SIZE]), f"token {VOCAB_SIZE}"),
        (make_request("a", [-1]), "token -1"),
        (make_request("a", [5], logit_bias={VOCAB_SIZE: 1.0}), f"token {VOCAB_SIZE}"),  # B048
        (make_request("a", [5], stop_token_ids=(2**40,), min_tokens=1), str(2**40)),  # B049
    ]
    for request, message in wrong:
        with pytest.raises(RequestError, match=message):
            core.add_request(request)
    with pytest.raises(ContextLengthError):
        core.add_request(make_request("a", [5] * 256))
    check_idle(core)
    core.add_request(make_request("a", PROMPT))
    with pytest.raises(RequestError, match="'a' is in use"):
        core.add_request(make_request("a", PROMPT))
    assert len(drain(core)) == 1


def test_abort_at_any_moment() -> None:
    model = FakeModel()
    for step in range(8):
        core = make_core(model, max_num_batched_tokens=16)
        core.add_request(make_request("gone", PROMPT, n=2, max_tokens=20))
        core.add_request(make_request("stays", PROMPT[::-1], max_tokens=6))
        early = [output for _ in range(step) for output in core.step()]
        core.abort(AbortRequest(request_id="gone"))
        core.abort(AbortRequest(request_id="gone"))
        core.abort(AbortRequest(request_id="never seen", index=3))
        out = drain(core)
        assert [out["gone", index].finish_reason for index in range(2)] == ["abort", "abort"]
        assert not out["gone", 0].token_ids
        tokens = [t for o in early if o.request_id == "stays" for t in o.token_ids] + (
            out["stays", 0].token_ids if ("stays", 0) in out else []
        )
        assert tokens == expected_greedy(model, PROMPT[::-1], 6)
        check_idle(core)


def test_abort_of_one_sample() -> None:
    model = FakeModel()
    core = make_core(model)
    core.add_request(make_request("r", PROMPT, n=3, max_tokens=8))
    early = [output for _ in range(4) for output in core.step()]
    core.abort(AbortRequest(request_id="r", index=1))
    out = drain(core)
    assert out["r", 1].finish_reason == "abort" and out["r", 1].token_ids == []
    for index in (0, 2):
        tokens = [t for o in early if o.index == index for t in o.token_ids] + out["r", index].token_ids
        assert tokens == expected_greedy(model, PROMPT, 8)
    check_idle(core)


def test_a_bad_row_ends_its_own_request_only() -> None:
    model = FakeModel()
    core = make_core(model)
    ban = {token: -100.0 for token in range(VOCAB_SIZE)}
    out = run(core, make_request("good", PROMPT, max_tokens=5), make_request("bad", PROMPT, logit_bias=ban))
    assert out["bad", 0].finish_reason == "error" and "banned" in (out["bad", 0].error or "")
    assert out["good", 0].token_ids == expected_greedy(model, PROMPT, 5)
    check_idle(core)


def test_min_tokens() -> None:  # B057
    core = make_core()
    force = {"ignore_eos": False, "logit_bias": {EOS: 100.0}, "max_tokens": 32}
    out = run(
        core,
        make_request("four", PROMPT[:10], min_tokens=4, **force),
        make_request("none", PROMPT[:10], **force),
    )
    four = out["four", 0]
    assert len(four.token_ids) == 5 and four.token_ids.index(EOS) == 4 and four.finish_reason == "stop"
    assert out["none", 0].token_ids == [EOS]


def test_padding_of_the_head() -> None:  # B058
    model = FakeModel(head_rows=VOCAB_SIZE + 20)
    core = make_core(model, vocab_size=VOCAB_SIZE)
    assert core.info().vocab_size == VOCAB_SIZE
    out = run(
        core,
        make_request("greedy", PROMPT, max_tokens=20, logprobs=5, prompt_logprobs=5),
        make_request("random", PROMPT, max_tokens=20, temperature=1.0),
    )
    assert out["greedy", 0].token_ids == expected_greedy(model, PROMPT, 20)
    assert max(out["random", 0].token_ids) < VOCAB_SIZE
    entries = (out["greedy", 0].logprobs or []) + (out["greedy", 0].prompt_logprobs or [])[1:]
    assert len(entries) == 59 and all(token < VOCAB_SIZE for entry in entries for token, _ in entry.top)


@pytest.mark.parametrize("budget", [8, 64])
@pytest.mark.parametrize("n", [1, 2])
def test_prompt_logprobs(budget: int, n: int) -> None:  # B041
    model = FakeModel()
    core = make_core(model, max_num_batched_tokens=budget)
    run(core, make_request("overlap", PROMPT[:30], max_tokens=1))
    expected = expected_logits(model, PROMPT).log_softmax(-1)
    for name in ("first", "second"):
        core.add_request(make_request(name + "-beside", PROMPT[::-1], max_tokens=4))
        out = run(core, make_request(name, PROMPT, n=n, prompt_logprobs=1, max_tokens=3))
        entries = out[name, 0].prompt_logprobs
        assert entries is not None and len(entries) == 40 and entries[0] is None
        for position, entry in enumerate(entries[1:], start=1):
            assert entry is not None and entry.token_id == PROMPT[position]
            assert entry.logprob == pytest.approx(expected[position - 1, PROMPT[position]].item(), abs=1e-4)
            assert entry.top[0][0] == int(expected[position - 1].argmax())
        assert out[name, 0].num_cached_tokens == 0 and out[name, 0].token_ids == expected_greedy(model, PROMPT, 3)
        assert all(out[name, index].prompt_logprobs is None for index in range(1, n))


def test_prompt_logprobs_of_one_token() -> None:
    out = run(make_core(), make_request("r", [5], prompt_logprobs=0, max_tokens=1))
    assert out["r", 0].prompt_logprobs == [None]


def test_prompt_logprobs_survive_preemption() -> None:
    model = FakeModel()
    core = make_core(model, num_blocks=16, max_num_batched_tokens=12)
    requests = [make_request(str(i), PROMPT[i : i + 22], prompt_logprobs=0, max_tokens=16) for i in range(3)]
    out = run(core, *requests)
    assert core.stats().num_preemptions > 0
    for index in range(3):
        prompt = PROMPT[index : index + 22]
        entries = out[str(index), 0].prompt_logprobs
        expected = expected_logits(model, prompt).log_softmax(-1)
        assert entries is not None and [entry.token_id for entry in entries[1:] if entry] == prompt[1:]
        assert [entry.logprob for entry in entries[1:] if entry] == pytest.approx(
            [expected[i, prompt[i + 1]].item() for i in range(21)], abs=1e-4
        )


def test_prompt_logprobs_of_a_prompt_that_was_preempted_halfway() -> None:
    model = FakeModel()
    core = make_core(model, num_blocks=14, max_num_batched_tokens=4)
    core.add_request(make_request("old", PROMPT[:8][::-1], max_tokens=20))
    for _ in range(2):
        core.step()
    core.add_request(make_request("new", PROMPT, prompt_logprobs=0, max_tokens=2))
    computed = []
    while core.has_work() and not core.stats().num_preemptions:
        computed = [sample.num_computed_tokens for sample in core._scheduler.running[1:]]
        core.step()
    assert core.stats().num_preemptions == 1 and 0 < computed[0] < len(PROMPT) - 1
    entries = drain(core)["new", 0].prompt_logprobs
    expected = expected_logits(model, PROMPT).log_softmax(-1)
    assert entries is not None and len(entries) == 40
    assert [entry.logprob for entry in entries[1:] if entry] == pytest.approx(
        [expected[i, PROMPT[i + 1]].item() for i in range(39)], abs=1e-4
    )


@pytest.mark.parametrize("length", [1, 4, 17, 40])
def test_logits(length: int) -> None:
    model = FakeModel()
    core = make_core(model, max_num_batched_tokens=16)
    core.add_request(make_request("r", PROMPT, max_tokens=30))
    core.step()
    assert torch.equal(core.logits(PROMPT[:length]), expected_logits(model, PROMPT[:length]))
    assert drain(core)["r", 0].token_ids == expected_greedy(model, PROMPT, 30)
    with pytest.raises(ContextLengthError, match="257 tokens"):
        core.logits([5] * 257)
    check_idle(core)


def test_a_seed_is_drawn_where_none_is_given() -> None:
    def tokens() -> tuple[int, ...]:
        request = make_request("r", PROMPT, seed=None, temperature=1.0, max_tokens=12)
        return tuple(run(make_core(), request)["r", 0].token_ids)

    assert len({tokens() for _ in range(3)}) > 1


def test_seeded_output_in_any_company() -> None:  # B050
    def request(name: str = "r") -> object:
        return make_request(name, PROMPT[:10], seed=42, temperature=0.8, max_tokens=16)

    alone = run(make_core(), request())["r", 0].token_ids
    others = [make_request(f"o{i}", PROMPT[i:], seed=i or None, temperature=1.0, max_tokens=16) for i in range(7)]
    assert run(make_core(), *others, request())["r", 0].token_ids == alone
    assert run(make_core(), *others[:3], request(), *others[3:])["r", 0].token_ids == alone
    tight = make_core(num_blocks=20)
    assert run(tight, *others, request())["r", 0].token_ids == alone
    assert tight.stats().num_preemptions > 0
    assert run(make_core(max_num_batched_tokens=4), *others, request())["r", 0].token_ids == alone


def test_shutdown_drops_everything() -> None:
    core = make_core()
    core.add_request(make_request("r", PROMPT, max_tokens=9))
    core.step()
    core.shutdown()
    assert not core.has_work() and core.stats().num_live_blocks == 0
