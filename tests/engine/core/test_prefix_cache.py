"""Prefix caching: keys, hits, isolation by salt and adapter, eviction."""

from __future__ import annotations

import hashlib

import pytest
from fake_core import FakeModel, KeyRecorder, check_idle, expected_greedy, make_core, make_request, run
from twofold.engine.core.prefix_cache import block_key, root_key

PROMPT = [2 + i % 50 for i in range(18)]  # four full blocks of four and two tokens


def test_keys_are_sha256_over_parent_and_tokens() -> None:
    parent = root_key(None, None)
    tokens = [1, 2, 300, 2**31]
    data = parent + b"".join(token.to_bytes(8, "little") for token in tokens)
    assert block_key(parent, tokens) == hashlib.sha256(data).digest()


def test_roots_differ_by_label_and_by_absence() -> None:  # B038
    extras = [
        (None, None),
        ("a", None),
        (None, "a"),
        (None, ""),
        ("", None),
        ("a", "b"),
        ("ab", None),
        ("a|salt:1:b", None),
    ]
    assert len({root_key(*pair) for pair in extras}) == len(extras)


@pytest.mark.parametrize("first, second, shares", [
    ({}, {}, True),
    ({"cache_salt": "a"}, {"cache_salt": "a"}, True),
    ({"cache_salt": "a"}, {"cache_salt": "b"}, False),
    ({"cache_salt": "a"}, {}, False),
    ({"cache_salt": "a"}, {"adapter": "a"}, False),
    ({"cache_salt": ""}, {}, False),
    ({"adapter": "a"}, {"adapter": "a"}, True),
])  # fmt: skip
def test_isolation(first: dict[str, str], second: dict[str, str], shares: bool) -> None:  # B038
    core = make_core()
    run(core, make_request("first", PROMPT, max_tokens=1, **first))
    out = run(core, make_request("second", PROMPT, max_tokens=1, **second))
    assert out["second", 0].num_cached_tokens == (16 if shares else 0)


@pytest.mark.parametrize("length, cached", [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8)])
def test_a_hit_leaves_the_last_token_to_compute(length: int, cached: int) -> None:
    model = FakeModel()
    core = make_core(model)
    for name in ("cold", "warm"):
        out = run(core, make_request(name, PROMPT[:length], max_tokens=6))[name, 0]
        assert out.token_ids == expected_greedy(model, PROMPT[:length], 6)
    assert out.num_cached_tokens == cached
    assert core.stats().num_cached_tokens == cached


def test_output_is_cached_too() -> None:
    model = FakeModel()
    core = make_core(model)
    first = run(core, make_request("a", PROMPT, max_tokens=10))["a", 0].token_ids
    second = run(core, make_request("b", PROMPT + first + [3], max_tokens=1))["b", 0]
    assert second.num_cached_tokens == 24  # the last drawn token was never computed, so 27 of 28 were


def test_switched_off() -> None:
    core = make_core(enable_prefix_caching=False)
    for name in "ab":
        out = run(core, make_request(name, PROMPT, max_tokens=1))
        assert out[name, 0].num_cached_tokens == 0
    assert core.stats().num_cached_blocks == 0


def test_reuse_of_evicted_blocks(monkeypatch: pytest.MonkeyPatch) -> None:  # B043
    recorder = KeyRecorder(monkeypatch)
    model = FakeModel()
    core = make_core(model, num_blocks=6)
    other = [40 + i % 20 for i in range(22)]
    for name, prompt, cached in (("a", PROMPT, 0), ("b", other, 0), ("a2", PROMPT, 0), ("a3", PROMPT, 16)):
        out = run(core, make_request(name, prompt, max_tokens=2))[name, 0]
        assert out.token_ids == expected_greedy(model, prompt, 2)
        assert out.num_cached_tokens == cached, name
        recorder.check(core)
    check_idle(core)


def test_eviction_spares_blocks_in_use(monkeypatch: pytest.MonkeyPatch) -> None:  # B043
    recorder = KeyRecorder(monkeypatch)
    model = FakeModel()
    core = make_core(model, num_blocks=12)
    run(core, make_request("a", PROMPT, max_tokens=1))
    core.add_request(make_request("live", PROMPT, max_tokens=10))
    outputs = core.step()
    assert outputs[0].num_cached_tokens == 16
    for index in range(4):  # each evicts what the others left
        other = [30 + (index * 7 + i) % 30 for i in range(9)]
        core.add_request(make_request(f"b{index}", other, max_tokens=2))
    tokens = [outputs[0].token_ids[0]]
    while core.has_work():
        for output in core.step():
            if output.request_id == "live":
                tokens += output.token_ids
        recorder.check(core)
    assert tokens == expected_greedy(model, PROMPT, 10)


def test_a_child_is_not_found_without_its_parent() -> None:  # B043
    core = make_core()
    run(core, make_request("a", PROMPT, max_tokens=1))
    pool = core._pool
    first = pool.lookup(block_key(root_key(None, None), PROMPT[:4]))
    assert first is not None
    pool._forget(first)
    assert run(core, make_request("b", PROMPT, max_tokens=1))["b", 0].num_cached_tokens == 0


def test_twenty_prompts_with_and_without_the_cache() -> None:  # B039
    model = FakeModel()
    core = make_core(model, num_blocks=40)
    for index in range(20):
        prompt = [2 + (i if i < 8 else i * (index + 1)) % 60 for i in range(10 + index)]
        assert run(core, make_request(str(index), prompt, max_tokens=4))[str(index), 0].token_ids == expected_greedy(
            model, prompt, 4
        )
    assert core.stats().num_cached_tokens > 0
