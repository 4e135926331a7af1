"""Stop strings, stop ids and min_tokens over HTTP."""

from __future__ import annotations

import pytest
from chain_model import ChainTokenizer
from http_server import RunningServer

SPECIAL_STOP = "<|stop|>"


@pytest.mark.parametrize(("include", "expected"), [(False, "abc"), (True, "abcd")])
def test_b011_stop_id(chain: RunningServer, chain_tokenizer: ChainTokenizer, include: bool, expected: str) -> None:
    stop_id = chain_tokenizer.id("d")
    answer = chain.complete("e", stop_token_ids=[stop_id], include_stop_str_in_output=include)
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (expected, "stop", stop_id)
    assert answer["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize(("include", "expected"), [(False, "ab"), (True, "abcd")])
def test_b011_stop_string(chain: RunningServer, include: bool, expected: str) -> None:
    answer = chain.complete("e", stop=["cd"], include_stop_str_in_output=include)
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (expected, "stop", "cd")
    assert answer["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize(
    ("skip", "include", "expected"),
    [(True, False, "klm"), (False, False, "klm"), (True, True, "klm"), (False, True, "klm" + SPECIAL_STOP)],
)
def test_b011_special_stop_id(
    chain: RunningServer, chain_tokenizer: ChainTokenizer, skip: bool, include: bool, expected: str
) -> None:
    fields = {"skip_special_tokens": skip, "include_stop_str_in_output": include}
    answer = chain.complete("f", stop_token_ids=[chain_tokenizer.id(SPECIAL_STOP)], **fields)
    assert answer["choices"][0]["text"] == expected and answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 4


def test_special_tokens_are_shown_on_demand(chain: RunningServer) -> None:
    assert chain.complete("f", max_tokens=5)["choices"][0]["text"] == "klmn"
    assert chain.complete("f", max_tokens=5, skip_special_tokens=False)["choices"][0]["text"] == f"klm{SPECIAL_STOP}n"


def test_b057_min_tokens(chain: RunningServer, chain_tokenizer: ChainTokenizer) -> None:
    """The model has two ids that end text, and the bias wants the second one at every step."""
    second = chain_tokenizer.id("<|eot|>")
    fields = {"logit_bias": {str(second): 100}, "max_tokens": 32, "temperature": 0}
    answer = chain.complete("x" * 10, min_tokens=4, **fields)
    assert answer["usage"]["completion_tokens"] == 5 and answer["choices"][0]["finish_reason"] == "stop"
    at_once = chain.complete("x" * 10, min_tokens=0, **fields)
    assert at_once["usage"]["completion_tokens"] == 1 and at_once["choices"][0]["text"] == ""
    response = chain.post("/v1/completions", {"model": chain.model, "prompt": "x", "min_tokens": 40, "max_tokens": 32})
    assert response.status_code == 400 and response.json()["error"]["param"] == "min_tokens"


def test_b057_stop_strings_wait_for_min_tokens(chain: RunningServer) -> None:
    answer = chain.complete("0", stop=["3"], min_tokens=4, max_tokens=30)
    assert answer["choices"][0]["text"] == "123456789012", "the 3 of the first round comes too early"


def test_ignore_eos(chain: RunningServer) -> None:
    answer = chain.complete("!", ignore_eos=True, max_tokens=5)
    assert answer["usage"]["completion_tokens"] == 5 and answer["choices"][0]["finish_reason"] == "length"
