"""Incremental decoding agrees with decoding the whole, for every family of tokenizer and every cut (B061 to B064)."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import pytest
from counting_core import ByteTokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_zoo import EOS, ZooTokenizer, byte_level_tokenizer, metaspace_tokenizer, sample_texts
from twofold.engine.detokenizer import IncrementalDetokenizer
from twofold.engine.sampling_params import SamplingParams
from twofold.engine.sources import ModelFiles
from twofold.engine.tokenizer import Tokenizer, load_tokenizer

ZOO = {
    "byte-level": byte_level_tokenizer(),
    "llama": metaspace_tokenizer("llama"),
    "metaspace": metaspace_tokenizer("metaspace"),
}


@pytest.fixture(params=list(ZOO))
def tokenizer(request: pytest.FixtureRequest) -> ZooTokenizer:
    return ZOO[request.param]


def increments(tokenizer: object, prompt: list[int], bursts: list[list[int]], **params: object) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, SamplingParams(**params))
    push = detokenizer.push
    parts = [detokenizer.push_token(burst[0]) if len(burst) == 1 else push(burst) for burst in bursts]
    return [*parts, detokenizer.finish()]


def random_bursts(ids: list[int], rng: random.Random) -> list[list[int]]:
    bursts = []
    while ids:
        size = rng.randint(1, 5)
        bursts.append(ids[:size])
        ids = ids[size:]
    return bursts


def expected(tokenizer: ZooTokenizer, prompt: list[int], ids: list[int], skip: bool = True) -> str:
    whole = tokenizer.decode([*prompt, *ids], skip_special_tokens=skip)
    return whole[len(tokenizer.decode(prompt, skip_special_tokens=skip)) :]


@pytest.mark.parametrize("skip", [True, False])
def test_b063_equals_whole_decode(tokenizer: ZooTokenizer, skip: bool) -> None:
    rng = random.Random(1)
    eos = tokenizer.backend.token_to_id(EOS)
    prompts: list[list[int]] = [[], [eos], tokenizer.encode("A prompt"), [eos, *tokenizer.encode(" x")]]
    for text in sample_texts(200):
        half = rng.randint(0, len(text))
        ids = [*tokenizer.encode(text[:half]), eos, *tokenizer.encode(text[half:])]
        for prompt in prompts:
            want = expected(tokenizer, prompt, ids, skip)
            one_by_one = increments(tokenizer, prompt, [[i] for i in ids], skip_special_tokens=skip)
            in_bursts = increments(tokenizer, prompt, random_bursts(ids, rng), skip_special_tokens=skip)
            assert "".join(one_by_one) == want
            assert "".join(in_bursts) == want
            assert not any("\ufffd" in text for text in one_by_one)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 255), max_size=12), st.lists(st.integers(0, 255), max_size=24), st.randoms())
def test_any_bytes(prompt: list[int], ids: list[int], rng: random.Random) -> None:
    tokenizer = ZOO["byte-level"]
    of_byte = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    prompt, ids = ([of_byte[bytes([value])] for value in values] for values in (prompt, ids))
    got = increments(tokenizer, prompt, random_bursts(ids, rng))
    assert "".join(got) == expected(tokenizer, prompt, ids)


@pytest.mark.parametrize("style", ["llama", "metaspace"])
@settings(max_examples=200, deadline=None)
@given(st.binary(min_size=1, max_size=24))
def test_fallback_bytes_are_decoded_as_bytes(style: str, data: bytes) -> None:
    tokenizer = ZOO[style]
    prompt = tokenizer.encode("x")
    ids = [tokenizer.backend.token_to_id(f"<0x{value:02X}>") for value in data]
    assert "".join(increments(tokenizer, prompt, [[i] for i in ids])) == data.decode(errors="replace")


@pytest.mark.parametrize("clean_up", [True, False])
def test_engine_tokenizer_agrees(tokenizer: ZooTokenizer, clean_up: bool, tmp_path: Path) -> None:
    """The same through the engine's own Tokenizer, whatever tokenizer_config.json says about cleaning up spaces."""
    tokenizer.backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"clean_up_tokenization_spaces": clean_up}))
    loaded = load_tokenizer(ModelFiles("zoo", tmp_path, "directory"))
    assert loaded.special_ids == tokenizer.special_ids
    for text in sample_texts(200, seed=2):
        for prompt_text in ("", "A prompt"):
            prompt, ids = tokenizer.encode(prompt_text), tokenizer.encode(text)
            got = increments(loaded, prompt, [[i] for i in ids])
            assert "".join(got) == expected(tokenizer, prompt, ids) == expected(loaded, prompt, ids)


@pytest.fixture(scope="module")
def fallback_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("fallback")
    ZOO["llama"].backend.save(str(directory / "tokenizer.json"))
    return load_tokenizer(ModelFiles("zoo", directory, "directory"))


@settings(max_examples=200, deadline=None)
@given(st.binary(min_size=1, max_size=24))
def test_engine_tokenizer_keeps_good_characters_beside_bad_bytes(fallback_tokenizer: Tokenizer, data: bytes) -> None:
    prompt, ids = ZOO["llama"].encode("x"), [ZOO["llama"].backend.token_to_id(f"<0x{value:02X}>") for value in data]
    assert fallback_tokenizer.decode(prompt + ids) == "x" + data.decode(errors="replace")
    assert fallback_tokenizer.decode(ids) == data.removeprefix(b" ").decode(errors="replace")


def test_split_characters_come_whole() -> None:
    text = "é你😀👨‍👩‍👧"
    got = increments(ByteTokenizer(), [65], [[value] for value in text.encode()])
    assert [piece for piece in got if piece] == list(text)


def test_incomplete_end_is_replaced() -> None:
    assert increments(ByteTokenizer(), [65], [[0xF0], [0x9F], [0x98]]) == ["", "", "", "\ufffd"]


def test_letter_after_incomplete_character_waits_for_nothing() -> None:
    assert increments(ByteTokenizer(), [65], [[0xF0], [0x41], [0xFF], [0x42]]) == ["", "\ufffdA", "\ufffd", "B", ""]


def test_prompt_that_ends_inside_a_character() -> None:
    prompt = list("a你".encode()[:-1])
    rest = "你".encode()[-1]
    assert increments(ByteTokenizer(), prompt, [[rest], [66]]) == ["", "B", ""]


def test_added_tokens_get_no_spaces(tokenizer: ZooTokenizer) -> None:
    ids = tokenizer.encode(f"<think>ok</think>1{EOS}")
    prompt = tokenizer.encode("x")
    assert "".join(increments(tokenizer, prompt, [[i] for i in ids])).replace(" ", "") == "<think>ok</think>1"
    shown = "".join(increments(tokenizer, prompt, [[i] for i in ids], skip_special_tokens=False))
    assert shown.replace(" ", "") == f"<think>ok</think>1{EOS}"


def test_cost_does_not_grow_with_the_text() -> None:
    """100,000 tokens: anything that decodes the text again would need hours, and a long prompt costs nothing."""
    began = time.perf_counter()
    detokenizer = IncrementalDetokenizer(ByteTokenizer(), [65] * 100_000, SamplingParams())
    for _ in range(100_000):
        detokenizer.push((97,))
    assert time.perf_counter() - began < 5.0
