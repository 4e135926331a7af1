"""Sampling fields at and beyond their limits: a 400 before the engine sees them, never a dead engine."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
from http_server import RunningServer

PROMPT = "The quick brown fox"


@pytest.fixture(scope="module")
def vocab_size(tiny: RunningServer) -> int:
    return tiny.client.info.vocab_size


def text_of(server: RunningServer, **fields: Any) -> str:
    fields = {"max_tokens": 8, "ignore_eos": True, **fields}
    return server.complete(PROMPT, **fields)["choices"][0]["text"]


def status_of(server: RunningServer, content: str) -> tuple[int, dict]:
    """Status and error of a raw body, for values that JSON encoders refuse to write."""
    response = server.http.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
    return response.status_code, response.json().get("error")


def raw(server: RunningServer, field: str, value: str) -> str:
    rest = json.dumps({"model": server.model, "prompt": "abc", "max_tokens": 4, "ignore_eos": True})
    return f'{rest[:-1]}, "{field}": {value}}}'


def check_alive(server: RunningServer) -> None:
    assert text_of(server, temperature=0, max_tokens=2) is not None
    server.wait_idle()


def together(calls: list[Callable[[], Any]]) -> list[Any]:
    """The results of calls made at the same time."""
    results: list[Any] = [None] * len(calls)

    def run(index: int) -> None:
        results[index] = calls[index]()

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def test_b045_top_k(tiny: RunningServer, vocab_size: int) -> None:
    unlimited = text_of(tiny, seed=1)
    for top_k in (-1, 0, vocab_size, vocab_size + 1, 10**7, 10**30):
        assert text_of(tiny, seed=1, top_k=top_k) == unlimited
    assert text_of(tiny, seed=1, top_k=1) == text_of(tiny, temperature=0)
    for bad in ("-2", "1.5", '"5"'):
        status, error = status_of(tiny, raw(tiny, "top_k", bad))
        assert status == 400 and error["param"] == "top_k"
    options = [{"temperature": 0}, {"seed": 3, "top_k": 5}, {"seed": 4, "top_k": vocab_size + 1}]
    alone = [text_of(tiny, **fields) for fields in options]
    assert together([lambda fields=fields: text_of(tiny, **fields) for fields in options]) == alone
    check_alive(tiny)


def test_b048_logit_bias(tiny: RunningServer, vocab_size: int) -> None:
    assert text_of(tiny, logit_bias={"65": 100}, temperature=0) == "A" * 8
    greedy = tiny.complete(PROMPT, temperature=0, max_tokens=1, logprobs=0)
    best = tiny.post("/tokenize", {"prompt": greedy["choices"][0]["text"]}).json()["tokens"][0]
    banned = tiny.complete(PROMPT, temperature=0, max_tokens=1, logit_bias={str(best): -100})
    assert banned["choices"][0]["text"] != greedy["choices"][0]["text"]
    for key in ("0", str(vocab_size - 1)):
        text_of(tiny, logit_bias={key: 1})
    text_of(tiny, logit_bias={str(index % vocab_size): 1 for index in range(3000)})
    for bias in (
        f'{{"{vocab_size}": 1}}',
        '{"999999": 1}',
        '{"-1": 1}',
        '{"abc": 1}',
        '{"1.0": 1}',
        '{"": 1}',
        f'{{"{"9" * 400}": 1}}',
        '{"1": 101}',
        '{"1": -101}',
        '{"1": "5"}',
        '{"1": null}',
        "[1]",
    ):
        status, error = status_of(tiny, raw(tiny, "logit_bias", bias))
        assert (status, error["param"]) == (400, "logit_bias"), bias
    assert status_of(tiny, raw(tiny, "logit_bias", '{"1": NaN}'))[0] == 400
    check_alive(tiny)


def test_b049_stop_ids_out_of_vocabulary(tiny: RunningServer, vocab_size: int) -> None:
    for ids in ([vocab_size], [vocab_size + 5], [-1], [2**40], [2**80], [1, vocab_size]):
        status, error = status_of(tiny, raw(tiny, "stop_token_ids", f'{ids}, "min_tokens": 1'))
        assert (status, error["param"]) == (400, "stop_token_ids"), ids
    for ids in ([], [vocab_size]):
        status, error = status_of(tiny, raw(tiny, "allowed_token_ids", f"{ids}"))
        assert (status, error["param"]) == (400, "allowed_token_ids"), ids
    check_alive(tiny)


def test_b050_seeds(tiny: RunningServer) -> None:
    fields = {"temperature": 0.8, "max_tokens": 16}
    alone = text_of(tiny, seed=42, **fields)
    for others in ([{}] * 7, [{"seed": seed} for seed in range(7)]):
        calls = [lambda extra=extra: text_of(tiny, **fields, **extra) for extra in others]
        calls.insert(4, lambda: text_of(tiny, seed=42, **fields))
        assert together(calls)[4] == alone

    def three() -> list[str]:
        answer = tiny.complete(PROMPT, seed=42, n=3, ignore_eos=True, **fields)
        return [choice["text"] for choice in answer["choices"]]

    assert three() == three() and len(set(three())) > 1 and three()[0] == alone
    assert text_of(tiny, seed=0, **fields) == text_of(tiny, seed=0, **fields)
    assert len({text_of(tiny, seed=0, **fields), text_of(tiny, **fields), text_of(tiny, **fields)}) > 1
    text_of(tiny, seed=2**63 - 1, **fields)
    for seed in ("-1", str(2**63), '"1"', "1.5"):
        status, error = status_of(tiny, raw(tiny, "seed", seed))
        assert (status, error["param"]) == (400, "seed")


LIMITED = [
    {"top_k": 1},
    {"top_p": 0.1},
    {"logit_bias": {"65": -100, "66": -100, "67": -100, "68": -100}},
    {"logit_bias": {str(index): -100 for index in range(200)}},
]


@pytest.mark.parametrize("fields", LIMITED)
def test_b054_logprobs_are_finite(tiny: RunningServer, chain: RunningServer, fields: dict) -> None:
    def strict(content: str) -> dict:
        def refuse(constant: str) -> None:
            raise AssertionError(f"{constant} in JSON")

        return json.loads(content, parse_constant=refuse)

    def check(values: list[float]) -> None:
        assert values and all(-9999.0 <= value <= 0.0 for value in values)

    base = {"max_tokens": 4, "temperature": 1, **fields}
    chat = {"messages": [{"role": "user", "content": "e"}], "logprobs": True, "top_logprobs": 5}
    for server in (tiny, chain):
        for extra in ({}, {"echo": True}):
            body = {"model": server.model, "prompt": "ea", "logprobs": 5, **base, **extra}
            logprobs = strict(server.post("/v1/completions", body).text)["choices"][0]["logprobs"]
            check([value for value in logprobs["token_logprobs"] if value is not None])
            check([value for row in logprobs["top_logprobs"] if row for value in row.values()])
        answer = strict(server.post("/v1/chat/completions", {"model": server.model, **chat, **base}).text)
        for entry in answer["choices"][0]["logprobs"]["content"]:
            check([entry["logprob"], *(candidate["logprob"] for candidate in entry["top_logprobs"])])
        with server.http.stream(
            "POST", "/v1/chat/completions", json={"model": server.model, "stream": True, **chat, **base}
        ) as response:
            lines = [line[6:] for line in response.iter_lines() if line.startswith("data: {")]
        assert sum(len((strict(line)["choices"][0]["logprobs"] or {}).get("content", [])) for line in lines) > 0


def test_b054_raw_distribution_whatever_the_filters(tiny: RunningServer) -> None:
    """Documented: log-probabilities are the model's own, before temperature, filters and biases."""

    def first(**fields: Any) -> dict[str, float]:
        answer = tiny.complete(PROMPT, max_tokens=1, logprobs=5, **fields)
        chosen = answer["choices"][0]["logprobs"]["tokens"][0]
        top = answer["choices"][0]["logprobs"]["top_logprobs"][0]
        return {token: value for token, value in top.items() if token != chosen}

    plain = tiny.complete(PROMPT, max_tokens=1, logprobs=20, temperature=0)["choices"][0]["logprobs"]["top_logprobs"][0]
    for fields in ({"temperature": 0}, {"top_k": 1}, {"temperature": 3, "seed": 1}, {"logit_bias": {"65": 100}}):
        for token, value in first(**fields).items():
            assert plain[token] == pytest.approx(value, abs=1e-4)
