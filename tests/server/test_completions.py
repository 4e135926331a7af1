"""/v1/completions: prompts of every kind, echo, log-probabilities, several samples."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path

import openai
import pytest
from chain_model import ChainTokenizer
from http_server import RunningServer, running_server
from tokenizer_zoo import metaspace_tokenizer


def texts(answer: dict) -> list[str]:
    return [choice["text"] for choice in answer["choices"]]


def test_shape(chain: RunningServer) -> None:
    answer = chain.complete("e")
    assert answer["object"] == "text_completion" and answer["model"] == chain.model
    assert answer["id"].startswith("cmpl-") and isinstance(answer["created"], int)
    assert answer["choices"] == [
        {"index": 0, "text": "abcd", "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    ]
    assert answer["usage"] == {
        "prompt_tokens": 1,
        "completion_tokens": 5,
        "total_tokens": 6,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def test_official_client(chain: RunningServer) -> None:
    answer = chain.openai.completions.create(model=chain.model, prompt="e", max_tokens=3, logprobs=1, n=2)
    assert [(choice.text, choice.finish_reason) for choice in answer.choices] == [("abc", "length")] * 2
    assert answer.choices[0].logprobs is not None and answer.choices[0].logprobs.tokens == ["a", "b", "c"]
    assert answer.usage is not None and answer.usage.completion_tokens == 6


def test_default_max_tokens_is_16(chain: RunningServer) -> None:
    answer = chain.complete("0")
    assert texts(answer) == ["1234567890123456"] and answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("n", [1, 2])
def test_several_prompts(chain: RunningServer, chain_tokenizer: ChainTokenizer, n: int) -> None:
    ids = [[chain_tokenizer.id(start)] for start in "we0"]
    expected = [text for text in ("xyS", "abc", "123") for _ in range(n)]
    for prompt in (["w", "e", "0"], ids):
        answer = chain.complete(prompt, max_tokens=3, n=n)
        assert texts(answer) == expected
        assert [choice["index"] for choice in answer["choices"]] == list(range(3 * n))
        assert answer["usage"]["prompt_tokens"] == 3 and answer["usage"]["completion_tokens"] == 9 * n


def test_token_ids_are_one_prompt(chain: RunningServer, chain_tokenizer: ChainTokenizer) -> None:
    answer = chain.complete([chain_tokenizer.id("w"), chain_tokenizer.id("e")], max_tokens=2, echo=True)
    assert texts(answer) == ["weab"] and answer["usage"]["prompt_tokens"] == 2


def test_several_prompts_streamed(chain: RunningServer) -> None:
    events = chain.events("/v1/completions", {"prompt": ["w", "e"], "max_tokens": 3, "n": 2})
    parts = {index: "" for index in range(4)}
    for event in events[:-1]:
        for choice in event["choices"]:
            parts[choice["index"]] += choice["text"]
    assert list(parts.values()) == ["xyS", "xyS", "abc", "abc"]
    assert events[-1] == {"done": True}


@pytest.mark.parametrize(
    "prompt",
    [[], [[]], ["e"] * 5000, ["e", 1], [1, "e"], [["e"]], [1.5], "", [""], [-1], [10**6], [2**70], None, {"a": 1}],
)
def test_bad_prompts(chain: RunningServer, prompt: object) -> None:
    response = chain.post("/v1/completions", {"model": chain.model, "prompt": prompt})
    assert response.status_code == 400 and response.json()["error"]["param"].startswith("prompt"), response.text


def test_one_bad_prompt_runs_none(chain: RunningServer) -> None:
    chain.wait_idle()
    before = chain.client.stats().num_prompt_tokens
    response = chain.post("/v1/completions", {"model": chain.model, "prompt": ["e", "e" * 300, "w"]})
    assert response.status_code == 400
    chain.wait_idle()
    assert chain.client.stats().num_prompt_tokens == before


def check_echo_offsets(server: RunningServer) -> None:
    prompt = "\n2) Mia owns 12"
    answer = server.complete(prompt, echo=True, logprobs=1, max_tokens=3, temperature=0, ignore_eos=True)
    choice = answer["choices"][0]
    logprobs, text = choice["logprobs"], choice["text"]
    count = answer["usage"]["prompt_tokens"] + 3
    assert text.startswith(prompt)
    assert {len(logprobs[name]) for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs")} == {count}
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    assert all(math.isfinite(value) and value <= 0 for value in logprobs["token_logprobs"][1:])
    assert logprobs["text_offset"] == sorted(logprobs["text_offset"])
    covered = 0
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        if not token.startswith(("bytes:", "<|")):
            assert text[offset : offset + len(token)] == token
            covered += len(token)
    assert covered >= len(prompt)


def test_b006_echo_offsets(tiny: RunningServer) -> None:
    check_echo_offsets(tiny)


@pytest.mark.parametrize("style", ["llama", "metaspace"])
def test_b006_echo_offsets_of_marked_words(tiny_model: Callable[..., Path], tmp_path: Path, style: str) -> None:
    """Tokenizers in sentencepiece's style mark where words begin, which the text does not show."""
    tokenizer = metaspace_tokenizer(style)
    folder = tmp_path / "model"
    shutil.copytree(tiny_model("llama", vocab_size=512), folder)
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        (folder / name).unlink(missing_ok=True)
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    with running_server(folder, num_threads=1) as server:
        check_echo_offsets(server)


def test_b041_prompt_logprobs_with_a_warm_cache(tiny: RunningServer) -> None:
    """The prompt is longer than a chunk (16) and than two blocks, so that caching and chunking both matter."""
    prompt = [(7 * index) % 256 for index in range(40)]

    def scores() -> list[float | None]:
        answer = tiny.complete(prompt, echo=True, logprobs=1, max_tokens=1, temperature=0, ignore_eos=True)
        return answer["choices"][0]["logprobs"]["token_logprobs"][:40]

    first = scores()
    assert len(first) == 40 and first[0] is None and all(value < 0 for value in first[1:])
    warm = tiny.complete(prompt, max_tokens=1)["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert warm > 0, "the cache holds nothing: the test proves nothing"
    tiny.complete([*prompt[:24], 1, 2, 3], max_tokens=1)
    for again in (scores(), scores()):
        assert again[1:] == pytest.approx(first[1:], abs=1e-4)


def test_echo_without_output(chain: RunningServer) -> None:
    """max_tokens 0 with echo scores a prompt, as evaluation harnesses ask for it."""
    answer = chain.complete("eabd", echo=True, logprobs=1, max_tokens=0)
    choice = answer["choices"][0]
    assert choice["text"] == "eabd" and choice["finish_reason"] == "length"
    assert choice["logprobs"]["tokens"] == list("eabd")
    assert (
        choice["logprobs"]["token_logprobs"][:3] == [None, 0.0, 0.0] and choice["logprobs"]["token_logprobs"][3] < -50
    )
    assert answer["usage"]["completion_tokens"] == 0
    refused = chain.post("/v1/completions", {"model": chain.model, "prompt": "e", "max_tokens": 0})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "max_tokens"


def test_echo_of_every_sample_streamed(chain: RunningServer) -> None:
    body = {"prompt": "e", "echo": True, "logprobs": 0, "n": 3, "max_tokens": 2}
    parts: dict[int, str] = {}
    tokens: dict[int, list[str]] = {}
    for event in chain.events("/v1/completions", body)[:-1]:
        for choice in event["choices"]:
            parts[choice["index"]] = parts.get(choice["index"], "") + choice["text"]
            tokens.setdefault(choice["index"], []).extend(choice["logprobs"]["tokens"])
    assert parts == {index: "eab" for index in range(3)}
    assert tokens == {index: ["e", "a", "b"] for index in range(3)}


def test_prompt_logprobs(chain: RunningServer, chain_tokenizer: ChainTokenizer) -> None:
    choice = chain.complete("ea", prompt_logprobs=1, max_tokens=1)["choices"][0]
    first, second = choice["prompt_logprobs"]
    assert first is None
    assert second == {str(chain_tokenizer.id("a")): {"logprob": 0.0, "rank": 1, "decoded_token": "a"}}
    assert choice["text"] == "b" and choice["logprobs"] is None
    response = chain.post(
        "/v1/completions", {"model": chain.model, "prompt": "e", "prompt_logprobs": 1, "stream": True}
    )
    assert response.status_code == 400 and response.json()["error"]["param"] == "prompt_logprobs"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("suffix", "the end"),
        ("best_of", 0),
        ("best_of", 129),
        ("store", True),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [10**6]),
        ("logprobs", 21),
        ("logprobs", -1),
        ("stop", ["x"] * 65),
        ("stop", [""]),
        ("cache_salt", ""),
        ("n", 0),
        ("n", 10**30),
        ("max_tokens", -1),
        ("max_tokens", 10**30),
        ("temperature", -0.1),
        ("top_p", 0),
        ("presence_penalty", 3),
    ],
)
def test_refused_fields(chain: RunningServer, field: str, value: object) -> None:
    response = chain.post("/v1/completions", {"model": chain.model, "prompt": "e", field: value})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == field and error["type"] == "invalid_request_error" and error["message"]


def test_unknown_and_neutral_fields_pass(chain: RunningServer) -> None:
    neutral = {
        "suffix": None,
        "best_of": 1,
        "user": "me",
        "store": False,
        "metadata": {"a": [1]},
        "tools": [],
        "n": None,
    }
    assert texts(chain.complete("e", response_format={"type": "text"}, stream_options=None, **neutral)) == ["abcd"]


def test_best_of(tiny: RunningServer) -> None:
    """The same samples as ``n`` draws with that seed, ranked by their mean log-probability; all of them count."""
    fields = {"max_tokens": 6, "seed": 3, "temperature": 1.5, "ignore_eos": True}
    drawn = tiny.complete(["one", "two"], n=5, logprobs=0, **fields)
    best = tiny.complete(["one", "two"], n=2, best_of=5, logprobs=0, **fields)
    plain = tiny.complete(["one", "two"], n=2, best_of=5, **fields)

    def mean(choice: dict) -> float:
        return sum(choice["logprobs"]["token_logprobs"]) / len(choice["logprobs"]["token_logprobs"])

    expected = []
    for start in (0, 5):
        expected += sorted(drawn["choices"][start : start + 5], key=mean, reverse=True)[:2]
    assert texts(best) == texts(plain) == [choice["text"] for choice in expected]
    assert [choice["logprobs"] for choice in best["choices"]] == [choice["logprobs"] for choice in expected]
    assert [choice["index"] for choice in best["choices"]] == [0, 1, 2, 3]
    assert all(choice["logprobs"] is None for choice in plain["choices"])
    assert best["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"] == 60
    with openai.OpenAI(base_url=f"{tiny.url}/v1", api_key="none", max_retries=0) as client:
        one = client.completions.create(model=tiny.model, prompt="one", best_of=5, max_tokens=6, seed=3)
    assert len(one.choices) == 1 and one.usage.completion_tokens > 6


def test_best_of_does_not_stream(chain: RunningServer) -> None:
    response = chain.post("/v1/completions", {"model": chain.model, "prompt": "e", "best_of": 2, "stream": True})
    assert response.status_code == 400 and response.json()["error"]["param"] == "best_of"
    *events, done = chain.events("/v1/completions", {"prompt": "e", "best_of": 2, "n": 2})
    assert done == {"done": True} and {event["choices"][0]["index"] for event in events} == {0, 1}


def test_cache_salt_isolates(tiny: RunningServer) -> None:
    prompt = [(11 * index + 5) % 256 for index in range(48)]

    def cached(salt: str | None) -> int:
        answer = tiny.complete(prompt, max_tokens=1, **({"cache_salt": salt} if salt else {}))
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert [cached("a"), cached("b"), cached(None)] == [0, 0, 0]
    assert min(cached("a"), cached("b"), cached(None)) > 0
