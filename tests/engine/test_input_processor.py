"""Every check of a request that needs no model (B048, B049, B090, B093)."""

from __future__ import annotations

import time

import pytest
from counting_core import ByteTokenizer
from twofold.engine.input_processor import InputProcessor
from twofold.engine.messages import EngineInfo
from twofold.engine.sampling_params import MAX_SEED, SamplingParams
from twofold.errors import ContextLengthError, RequestError

MAX_MODEL_LEN = 32


def make_inputs(generation: dict | None = None, tokenizer: ByteTokenizer | None = None) -> InputProcessor:
    info = EngineInfo(
        model_name="m",
        vocab_size=300,
        max_model_len=MAX_MODEL_LEN,
        block_size=16,
        num_blocks=4,
        device="cpu",
        dtype="float32",
    )
    return InputProcessor(tokenizer or ByteTokenizer(), info, generation)


class CountingTokenizer(ByteTokenizer):
    num_calls = 0

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.num_calls += 1
        return super().encode(text, add_special_tokens)


def test_text_and_ids_make_the_same_request() -> None:
    inputs = make_inputs()
    params = SamplingParams(max_tokens=3, seed=0)
    text = inputs.make_request("abc", params, request_id="1", cache_salt="salt")
    ids = inputs.make_request([97, 98, 99], params, request_id="1", cache_salt="salt")
    assert text.prompt_token_ids == ids.prompt_token_ids == [97, 98, 99]
    assert (text.cache_salt, text.params.seed) == ("salt", 0)
    assert abs(text.arrival_time - time.time()) < 5


def test_seed_is_drawn_where_none_is_given() -> None:
    inputs = make_inputs()
    params = SamplingParams(max_tokens=1)
    seeds = [inputs.make_request("a", params, request_id="1").params.seed for _ in range(20)]
    assert all(seed is not None and 0 <= seed <= MAX_SEED for seed in seeds)
    assert len(set(seeds)) == 20
    assert params.seed is None


@pytest.mark.parametrize(
    ("prompt", "params", "param"),
    [
        ("", {}, "prompt"),
        ([], {}, "prompt"),
        ([1, "2"], {}, "prompt"),
        ([1, True], {}, "prompt"),
        ([1, -1], {}, "prompt"),
        ([1, 256], {}, "prompt"),
        ([1, 2**70], {}, "prompt"),
        ("a", {"logit_bias": {256: 1.0}}, "logit_bias"),
        ("a", {"logit_bias": {-1: 1.0}}, "logit_bias"),
        ("a", {"stop_token_ids": (2**40,)}, "stop_token_ids"),
    ],
)
def test_wrong_requests_name_the_field(prompt: str | list[int], params: dict, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        make_inputs().make_request(prompt, SamplingParams(max_tokens=1, **params), request_id="1")
    assert caught.value.param == param


@pytest.mark.parametrize(("num_tokens", "max_tokens"), [(31, 1), (16, 16), (31, None)])
def test_what_fits_exactly(num_tokens: int, max_tokens: int | None) -> None:
    request = make_inputs().make_request([1] * num_tokens, SamplingParams(max_tokens=max_tokens), request_id="1")
    assert len(request.prompt_token_ids) == num_tokens


@pytest.mark.parametrize(
    ("num_tokens", "max_tokens", "numbers"),
    [(32, None, ("32",)), (40, 1, ("40", "32")), (31, 2, ("31", "33", "32")), (16, 17, ("16", "17", "33", "32"))],
)
def test_what_does_not_fit_names_the_numbers(num_tokens: int, max_tokens: int | None, numbers: tuple[str, ...]) -> None:
    with pytest.raises(ContextLengthError) as caught:
        make_inputs().make_request([1] * num_tokens, SamplingParams(max_tokens=max_tokens), request_id="1")
    assert caught.value.code == "context_length_exceeded"
    assert all(number in str(caught.value) for number in numbers)


def test_huge_text_is_refused_without_tokenizing() -> None:
    tokenizer = CountingTokenizer()
    inputs = make_inputs(tokenizer=tokenizer)
    with pytest.raises(ContextLengthError, match="30000000 characters"):
        inputs.make_request("a" * 30_000_000, SamplingParams(), request_id="1")
    assert tokenizer.num_calls == 0


def test_generation_defaults_and_what_overrides_them() -> None:
    inputs = make_inputs({"temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": 7, "min_p": None})
    params = inputs.default_params(top_k=5, max_tokens=9)
    assert (params.temperature, params.top_k, params.top_p, params.min_p, params.max_tokens) == (0.6, 5, 0.95, 0.0, 9)
    assert make_inputs({"do_sample": False, "temperature": 0.6}).default_params().is_greedy
    assert make_inputs().default_params() == SamplingParams()
